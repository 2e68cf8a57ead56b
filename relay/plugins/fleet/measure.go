package fleet

import (
	"context"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// measure asks boards in two rounds, one for each of sources. needs decides before each round, so that the
// second one leaves out boards for which the figures of the first are enough. The questions of a round run
// at the same time, within the slots of the tenant. askBoards delivers the answers one at a time, so that
// list needs no lock.

// measured is what measure found out about a board.
type measured struct {
	figures
	// unknown says why a figure that was needed is not known; "" if none was missing.
	unknown string
}

// sources are the tools that figures come from, in the order in which they are asked: a metrics
// snapshot costs a board less than a reading of its sensors.
var sources = []struct {
	kind, verb string
	isModule   bool
}{
	{manifest.KindMetrics, manifest.VerbSnapshot, false},
	{manifest.KindModules, manifest.VerbRead, true},
}

// measure returns the figures of boards, none older than maxFigureAge. needs reports whether a board with
// such figures has to be asked for a frame, or for its modules. A board that could not answer the one is
// not asked for the other. The caller must have the right to call the boards' tools.
func (p *Plugin) measure(ctx context.Context, r *kernel.Request, boards []Board, needs func(f *figures, modules bool) bool) ([]measured, error) {
	ctx, cancel := context.WithTimeout(ctx, askAllTimeout)
	defer cancel()
	// One time for both rounds, so that a figure that was fresh in the first is so in the second.
	now := p.opt.Now()
	list := make([]measured, len(boards))
	for i := range boards {
		if boards[i].Status == Offline {
			list[i] = measured{*newFigures(), reasonOffline}
			continue
		}
		list[i].figures = p.figures.get(p.opt.Boards, p.cacheKey(r, boards[i].ID), now)
	}
	for _, source := range sources {
		var questions []question
		for i := range boards {
			f := &list[i].figures
			if list[i].unknown != "" || !needs(f, source.isModule) {
				continue
			}
			tool, ok := p.boardTool(ctx, r.Caller.Tenant, boards[i].ID, source.kind, source.verb)
			switch {
			case boards[i].Status == Suspect:
				list[i].unknown = reasonSuspect
			case !ok:
				list[i].unknown = reasonNotMeasured
			default:
				questions = append(questions, question{tool, i})
			}
		}
		if len(questions) == 0 {
			continue
		}
		err := p.askBoards(ctx, r, questions, func(q question, res *kernel.Result, err error) {
			i := q.about
			if err != nil {
				list[i].unknown = coarseReasonOf(err)
				return
			}
			p.figures.put(p.cacheKey(r, boards[i].ID), source.kind, res.Structured, p.opt.Now())
			list[i].figures = p.figures.get(p.opt.Boards, p.cacheKey(r, boards[i].ID), now)
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}
