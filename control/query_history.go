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

// hangUpCheckRows is how many rows are worked off before it is looked whether the client is there.
const hangUpCheckRows = 1024

var (
	errStopQuery   = errors.New("enough")    // ends a query that gave what was wanted
	errNeedsBuffer = errors.New("not small") // ends a query that must wait for its turn
	errHungUp      = errors.New("the client hung up")
)

// historyRequest is a query_history in work.
type historyRequest struct {
	ss     *session
	window HistoryQuery // as it goes to Options.History
	set    prober.ModuleSet
	max    int // items, 0 for no limit
	end    int64

	buf             []byte // all items as long as they are few, else those that are not out yet
	hasAnswerBuffer bool   // it is in the server's memory for answers that are not small
	isLong          bool   // no longer few
	rows            int    // given by the history
	items, size     int    // of the items, with the commas between them
	first, last     int64  // ts of items
	isEnough        bool   // fn ended the query
}

func (ss *session) history(ctx context.Context, f *params) (any, error) {
	q := &historyRequest{ss: ss}
	if err := q.parse(f); err != nil {
		return nil, err
	}
	if ss.requestID == "" {
		return nil, nil // a notification: nobody waits for the answer
	}
	defer func() {
		if q.hasAnswerBuffer {
			ss.srv.answerBuffer <- q.buf[:0]
		}
	}()
	err := q.countPass(ctx)
	if errors.Is(err, errNeedsBuffer) {
		if err := q.acquireBuffer(ctx); err != nil {
			return nil, err
		}
		err = q.countPass(ctx)
	}
	switch e := (*Error)(nil); {
	case errors.As(err, &e):
		return nil, e
	case err != nil && (q.rows > 0 || ctx.Err() != nil):
		return nil, q.queryError(ctx, err)
	case err != nil && ss.srv.allowWarning(): // the history is closed, or its disk is busy
		ss.srv.log.Warn("query_history: a snapshot is given", zap.Error(err))
	}
	if q.items == 0 {
		if err := q.snapshot(ctx); err != nil {
			return nil, err
		}
	}
	write := q.writeBuffered
	if q.isLong {
		write = q.writeSecondPass
	}
	if err := write(ctx); err != nil {
		ss.srv.log.Debug("query_history: the answer is cut off", zap.Error(err))
		return nil, q.queryError(ctx, err)
	}
	ss.c.isStreamed = true
	return nil, nil
}

func (q *historyRequest) parse(f *params) error {
	from, to := f.requireInteger("from_ts"), f.requireInteger("to_ts")
	step, limit := f.integer("step_ms"), f.integer("limit")
	s := q.ss.srv
	s.mu.Lock()
	q.set = s.sampling.modules
	s.mu.Unlock()
	q.set = f.modules("modules", q.set)
	if to > 0 && from > to {
		f.fail(errParams("to_ts", "is before from_ts"))
	}
	if err := f.finish(); err != nil {
		return err
	}
	now, ok := s.clock.NowMS()
	if q.end = to; to == 0 {
		q.end = now
	}
	if to == 0 && ok {
		to = now // not later rows the second time
	}
	q.window = HistoryQuery{FromMS: from, ToMS: to, StepMS: step, Modules: q.set.Names()}
	q.max = int(min(limit, math.MaxInt32))
	return nil
}

// run asks the history. An empty window, which one that begins in the future is, gives
// no error.
func (q *historyRequest) run(ctx context.Context, fn func(context.Context, *HistoryRow) error) error {
	h := q.ss.srv.o.History
	if h == nil || q.window.ToMS > 0 && q.window.FromMS > q.window.ToMS {
		return nil
	}
	q.rows, q.isEnough = 0, false
	err := h.Query(ctx, q.window, func(row HistoryRow) error {
		if q.rows++; q.rows%hangUpCheckRows == 0 && q.ss.c.isHungUp() {
			return errHungUp
		}
		err := fn(ctx, &row)
		if errors.Is(err, errStopQuery) {
			q.isEnough = true
		}
		return err
	})
	if q.isEnough {
		return nil
	}
	return err
}

// appendItem appends a row to buf, behind a comma if it is not the first, and returns
// how many bytes that were.
func (q *historyRequest) appendItem(row *HistoryRow) int {
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

// countPass is the first pass. Few are made at a time, none of which waits for a client.
func (q *historyRequest) countPass(ctx context.Context) error {
	place, err := acquire(ctx, q.ss.c, q.ss.srv.countSlots)
	if err != nil {
		return q.queryError(ctx, err)
	}
	defer func() { q.ss.srv.countSlots <- place }()
	q.buf, q.items, q.size = q.buf[:0], 0, 0
	return q.run(ctx, q.count)
}

// count takes a row of the first pass.
func (q *historyRequest) count(ctx context.Context, row *HistoryRow) error {
	if q.isLong {
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
		return errParams("step_ms", "the answer would be longer than %d MiB: ask with step_ms %d or more, or for a shorter window, or with a limit", maxAnswer>>20, q.minStep())
	case q.items == q.max:
		return errStopQuery
	case !q.hasAnswerBuffer && q.size > maxSmallAnswer:
		return errNeedsBuffer
	}
	q.isLong = q.size > maxKeptAnswer
	return nil
}

// length of the whole answer.
func (q *historyRequest) length() int {
	return len(answerHead) + len(q.ss.requestID) + len(answerBody) + q.size + len(answerTail)
}

// minStep is the step that makes the answer short enough, in whole seconds.
func (q *historyRequest) minStep() int64 {
	room := maxAnswer / (q.size/q.items + 1)
	step := (max(q.end, q.last)-q.first)/int64(room) + 1
	return (step + 999) / 1000 * 1000
}

// acquireBuffer waits for the memory of answers that are not small. The one who has it may
// have to wait for its client; meanwhile nothing is held here.
func (q *historyRequest) acquireBuffer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	mem, err := acquire(ctx, q.ss.c, q.ss.srv.answerBuffer)
	if errors.Is(err, context.DeadlineExceeded) {
		return newError(CodeRateLimited, "another long answer of query_history is being read: try again, or ask with a larger step_ms")
	}
	if err != nil {
		return err
	}
	if q.hasAnswerBuffer = true; mem == nil {
		mem = make([]byte, 0, maxKeptAnswer+writeSize)
	}
	q.buf = mem
	return nil
}

// acquire receives from ch, unless ctx ends or the client hangs up before.
func acquire(ctx context.Context, c *serverChannel, ch <-chan []byte) ([]byte, error) {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case mem := <-ch:
			return mem, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-ticker.C:
			if c.isHungUp() { // its place is wanted
				return nil, errHungUp
			}
		}
	}
}

// queryError is why there is no answer.
func (q *historyRequest) queryError(ctx context.Context, err error) error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return newError(CodeInternal, fmt.Sprintf("query_history took longer than %v: ask for a shorter window, or with a larger step_ms", queryTimeout))
	}
	return newError(CodeInternal, err.Error())
}

// snapshot is the answer when nothing was recorded: what the machine says now.
func (q *historyRequest) snapshot(ctx context.Context) error {
	sample, err := q.ss.srv.prober.Now(ctx)
	if err != nil {
		return newError(CodeInternal, err.Error())
	}
	row := rowOf(&sample)
	if q.size = q.appendItem(&row); q.size == 0 {
		q.buf = fmt.Appendf(q.buf, `{"ts":%d}`, row.TS)
		q.size = len(q.buf)
	}
	return nil
}

// writeBuffered writes what the first pass has kept.
func (q *historyRequest) writeBuffered(context.Context) error {
	return q.ss.c.stream(q.length(), func(write func([]byte) error) error {
		return errors.Join(write(q.head(nil)), write(q.buf), write([]byte(answerTail)))
	})
}

func (q *historyRequest) head(b []byte) []byte {
	return append(append(append(b, answerHead...), q.ss.requestID...), answerBody...)
}

// writeSecondPass is the second pass: it writes as many bytes as the first has counted.
func (q *historyRequest) writeSecondPass(ctx context.Context) error {
	size, last := q.size, q.last
	return q.ss.c.stream(q.length(), func(write func([]byte) error) error {
		q.buf = q.head(q.buf[:0])
		q.items, q.size = 0, 0
		q.window.ToMS = last
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
				return errStopQuery
			}
			if n > 0 {
				q.items, q.size = q.items+1, q.size+n
			}
			if len(q.buf) >= writeSize {
				return flush()
			}
			return nil
		})
		for left := size - q.size; left > 0 && err == nil; left -= min(left, writeSize) {
			q.buf = append(q.buf, bytes.Repeat([]byte{' '}, min(left, writeSize))...)
			err = flush()
		}
		if err == nil {
			q.buf = append(q.buf, answerTail...)
			err = flush()
		}
		return err
	})
}
