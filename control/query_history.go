package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"agentctl/prober"

	"go.uber.org/zap"
)

// An answer of query_history may be far longer than what a board can spare in memory,
// and its length stands in front of it. So the history is asked twice: once to count,
// and a second time to write. What changed in between fits by cutting and padding. An
// answer that turns out shorter than 256 KiB is kept from the first time.

const (
	answerHead = `{"jsonrpc":"2.0","id":`
	answerBody = `,"result":{"ok":true,"items":[`
	answerTail = `]}}`
)

// look is how many rows are worked off before it is looked whether the client is there.
const look = 1024

var (
	errEnough = errors.New("enough")    // ends a query that gave what was wanted
	errTurn   = errors.New("not small") // ends a query that must wait for its turn
	errHungUp = errors.New("the client hung up")
)

// query is a query_history in work.
type query struct {
	ss  *session
	ask HistoryQuery // as it goes to Options.History
	set prober.ModuleSet
	max int // items, 0 for no limit
	end int64

	buf         []byte // all items as long as they are few, else those that are not out yet
	turn        bool   // it is in the server's memory for answers that are not small
	long        bool   // no longer few
	rows        int    // given by the history
	items, size int    // of the items, with the commas between them
	first, last int64  // ts of items
	enough      bool   // fn ended the query
}

func (ss *session) history(ctx context.Context, f *fields) (any, error) {
	q := &query{ss: ss}
	if err := q.parse(f); err != nil {
		return nil, err
	}
	if ss.asked == "" {
		return nil, nil // a notification: nobody waits for the answer
	}
	defer func() {
		if q.turn {
			ss.srv.long <- q.buf[:0]
		}
	}()
	err := q.countAll(ctx)
	if errors.Is(err, errTurn) {
		if err := q.takeTurn(ctx); err != nil {
			return nil, err
		}
		err = q.countAll(ctx)
	}
	switch e := (*Error)(nil); {
	case errors.As(err, &e):
		return nil, e
	case err != nil && (q.rows > 0 || ctx.Err() != nil):
		return nil, q.failed(ctx, err)
	case err != nil && ss.srv.mayWarn(): // the history is closed, or its disk is busy
		ss.srv.log.Warn("query_history: a snapshot is given", zap.Error(err))
	}
	if q.items == 0 {
		if err := q.snapshot(ctx); err != nil {
			return nil, err
		}
	}
	write := q.writeKept
	if q.long {
		write = q.writeAgain
	}
	if err := write(ctx); err != nil {
		ss.srv.log.Debug("query_history: the answer is cut off", zap.Error(err))
		return nil, q.failed(ctx, err)
	}
	ss.c.streamed = true
	return nil, nil
}

func (q *query) parse(f *fields) error {
	from, to := f.whole("from_ts", true), f.whole("to_ts", true)
	step, limit := f.whole("step_ms", false), f.whole("limit", false)
	s := q.ss.srv
	s.mu.Lock()
	q.set = s.push.modules
	s.mu.Unlock()
	q.set = f.modules("modules", q.set)
	if to > 0 && from > to {
		f.fail(errParams("to_ts", "is before from_ts"))
	}
	if err := f.end(); err != nil {
		return err
	}
	now, ok := s.clock.NowMS()
	if q.end = to; to == 0 {
		q.end = now
	}
	if to == 0 && ok {
		to = now // not later rows the second time
	}
	q.ask = HistoryQuery{FromMS: from, ToMS: to, StepMS: step, Modules: q.set.Names()}
	q.max = int(min(limit, math.MaxInt32))
	return nil
}

// run asks the history. An empty window, which one that begins in the future is, gives
// no error.
func (q *query) run(ctx context.Context, fn func(context.Context, *HistoryRow) error) error {
	h := q.ss.srv.o.History
	if h == nil || q.ask.ToMS > 0 && q.ask.FromMS > q.ask.ToMS {
		return nil
	}
	q.rows, q.enough = 0, false
	err := h.Query(ctx, q.ask, func(row HistoryRow) error {
		if q.rows++; q.rows%look == 0 && q.ss.c.hungUp() {
			return errHungUp
		}
		err := fn(ctx, &row)
		if errors.Is(err, errEnough) {
			q.enough = true
		}
		return err
	})
	if q.enough {
		return nil
	}
	return err
}

// appendItem appends a row to buf, behind a comma if it is not the first, and returns
// how many bytes that were.
func (q *query) appendItem(row *HistoryRow) int {
	begin := len(q.buf)
	if q.items > 0 {
		q.buf = append(q.buf, ',')
	}
	item := len(q.buf)
	if q.buf = appendRow(q.buf, q.set, row); len(q.buf) == item {
		q.buf = q.buf[:begin]
		return 0
	}
	return len(q.buf) - begin
}

// countAll is the first pass. Few are made at a time, none of which waits for a client.
func (q *query) countAll(ctx context.Context) error {
	place, err := take(ctx, q.ss.c, q.ss.srv.places)
	if err != nil {
		return q.failed(ctx, err)
	}
	defer func() { q.ss.srv.places <- place }()
	q.buf, q.items, q.size = q.buf[:0], 0, 0
	return q.run(ctx, q.count)
}

// count takes a row of the first pass.
func (q *query) count(ctx context.Context, row *HistoryRow) error {
	if q.long {
		q.buf = q.buf[:0]
	}
	n := q.appendItem(row)
	if n == 0 {
		return nil
	}
	if q.items++; q.items == 1 {
		q.first = row.TS
	}
	q.size, q.last = q.size+n, row.TS
	switch {
	case q.length() > maxAnswer:
		return errParams("step_ms", "the answer would be longer than %d MiB: ask with step_ms %d or more, or for a shorter window, or with a limit", maxAnswer>>20, q.fittingStep())
	case q.items == q.max:
		return errEnough
	case !q.turn && q.size > smallAnswer:
		return errTurn
	}
	q.long = q.size > longAnswer
	return nil
}

// length of the whole answer.
func (q *query) length() int {
	return len(answerHead) + len(q.ss.asked) + len(answerBody) + q.size + len(answerTail)
}

// fittingStep is the step that makes the answer short enough, in whole seconds.
func (q *query) fittingStep() int64 {
	room := maxAnswer / (q.size/q.items + 1)
	step := (max(q.end, q.last)-q.first)/int64(room) + 1
	return (step + 999) / 1000 * 1000
}

// takeTurn waits for the memory of answers that are not small. The one who has it may
// have to wait for its client; meanwhile nothing is held here.
func (q *query) takeTurn(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	mem, err := take(ctx, q.ss.c, q.ss.srv.long)
	if errors.Is(err, context.DeadlineExceeded) {
		return errRate("another long answer of query_history is being read: try again, or ask with a larger step_ms")
	}
	if err != nil {
		return err
	}
	if q.turn = true; mem == nil {
		mem = make([]byte, 0, longAnswer+chunk)
	}
	q.buf = mem
	return nil
}

// take receives from ch, unless ctx ends or the client hangs up before.
func take(ctx context.Context, c *serverChannel, ch <-chan []byte) ([]byte, error) {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case mem := <-ch:
			return mem, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-ticker.C:
			if c.hungUp() { // its place is wanted
				return nil, errHungUp
			}
		}
	}
}

// failed is why there is no answer.
func (q *query) failed(ctx context.Context, err error) error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return errInternal(fmt.Sprintf("query_history took longer than %v: ask for a shorter window, or with a larger step_ms", queryTimeout))
	}
	return errInternal(err.Error())
}

// snapshot is the answer when nothing was recorded: what the machine says now.
func (q *query) snapshot(ctx context.Context) error {
	sample, err := q.ss.srv.prober.Now(ctx)
	if err != nil {
		return errInternal(err.Error())
	}
	row := rowOf(&sample)
	if q.size = q.appendItem(&row); q.size == 0 {
		q.buf = fmt.Appendf(q.buf, `{"ts":%d}`, row.TS)
		q.size = len(q.buf)
	}
	return nil
}

// writeKept writes what the first pass has kept.
func (q *query) writeKept(context.Context) error {
	return q.ss.c.stream(q.length(), func(write func([]byte) error) error {
		return errors.Join(write(q.head(nil)), write(q.buf), write([]byte(answerTail)))
	})
}

func (q *query) head(b []byte) []byte {
	return append(append(append(b, answerHead...), q.ss.asked...), answerBody...)
}

// writeAgain is the second pass: it writes as many bytes as the first has counted.
func (q *query) writeAgain(ctx context.Context) error {
	size, last := q.size, q.last
	return q.ss.c.stream(q.length(), func(write func([]byte) error) error {
		q.buf = q.head(q.buf[:0])
		q.items, q.size = 0, 0
		q.ask.ToMS = last
		flush := func() error {
			err := write(q.buf)
			q.buf = q.buf[:0]
			return errors.Join(err, ctx.Err())
		}
		err := q.run(ctx, func(_ context.Context, row *HistoryRow) error {
			before := len(q.buf)
			n := q.appendItem(row)
			if row.TS > last || q.size+n > size {
				q.buf = q.buf[:before]
				return errEnough
			}
			if n > 0 {
				q.items, q.size = q.items+1, q.size+n
			}
			if len(q.buf) >= chunk {
				return flush()
			}
			return nil
		})
		for left := size - q.size; left > 0 && err == nil; left -= min(left, chunk) {
			q.buf = append(q.buf, bytes.Repeat([]byte{' '}, min(left, chunk))...)
			err = flush()
		}
		if err == nil {
			q.buf = append(q.buf, answerTail...)
			err = flush()
		}
		return err
	})
}
