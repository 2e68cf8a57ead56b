package fleet

import (
	"context"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Why a figure of a board is not known, in answers.
const (
	notMeasured = "not_measured" // the board has no such figure
	noAnswer    = "no_answer"    // it did not answer within askTimeout
	notAsked    = "not_asked"    // there was no time to ask it
	refused     = "refused"      // a scope or a limit of its tool
	failed      = "failed"       // it answered with an error
)

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

// measure returns the figures of boards, none older than maxFigureAge. Boards whose figures are not
// known are asked, if needs reports for their present figures that a frame or modules are needed. A
// board that could not answer the one is not asked for the other.
// It takes the caller's own right to call the boards' tools.
func (p *Plugin) measure(ctx context.Context, r *kernel.Request, boards []Board, needs func(f *figures, modules bool) bool) ([]measured, error) {
	ctx, cancel := context.WithTimeout(ctx, askAllTimeout)
	defer cancel()
	now := time.Now()
	list := make([]measured, len(boards))
	for i := range boards {
		if boards[i].Status == Offline {
			list[i] = measured{*newFigures(), string(Offline)}
			continue
		}
		list[i].figures = p.figures.get(p.opt.Boards, p.cacheKey(r, boards[i].ID), now)
	}
	for _, source := range sources {
		var questions []question
		var of []int // index of the board of each question
		for i := range boards {
			f := &list[i].figures
			if list[i].unknown != "" || !needs(f, source.isModule) {
				continue
			}
			tool, ok := p.boardTool(ctx, r.Caller.Tenant, boards[i].ID, source.kind, source.verb)
			switch {
			case boards[i].Status == Suspect:
				list[i].unknown = string(Suspect)
			case !ok:
				list[i].unknown = notMeasured
			default:
				questions, of = append(questions, question{tool: tool}), append(of, i)
			}
		}
		if len(questions) == 0 {
			continue
		}
		err := p.askBoards(ctx, r, questions, func(q int, res *kernel.Result, err error) {
			i := of[q]
			if err != nil {
				list[i].unknown = whyUnknown(err)
				return
			}
			p.figures.put(p.cacheKey(r, boards[i].ID), source.kind, res.Structured, time.Now())
			list[i].figures = p.figures.get(p.opt.Boards, p.cacheKey(r, boards[i].ID), now)
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// whyUnknown names the reason for which a board could not be read.
func whyUnknown(err error) string {
	e := manifest.AsError(err)
	switch {
	case e == errNotAsked:
		return notAsked
	case e.Code == manifest.DeadlineExceeded:
		return noAnswer
	case e.Code == manifest.NodeOffline && e.Reason == "suspect":
		return string(Suspect)
	case e.Code == manifest.NodeOffline:
		return string(Offline)
	case e.Code == manifest.SafetyDenied || e.Code == manifest.RateLimited:
		return refused
	}
	return failed
}
