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

// An answer of query_history may be far longer than the memory that a board can spare, and
// its length is in the header before it. So there are two passes over the history:
//
//	count   the items are encoded and counted. Up to 32 KiB they are kept; beyond, up to 1 MiB
//	        by the holder of the server's answer slot. When another one holds it, the pass
//	        ends, waits for the slot and starts again. At most maxQueries run at once; none
//	        blocks on a client.
//	write   what was kept is written. A longer answer is queried and encoded again, and cut
//	        or padded with blanks to the counted length, as the history may have changed.
//
// So all clients together use a bounded amount of memory; others wait for the slot.

const (
	answerHead = `{"jsonrpc":"2.0","id":`
	answerBody = `,"result":{"ok":true,"items":[`
	answerTail = `]}}`
)

// hangUpCheckRows is after how many rows a query checks whether the client is still there.
const hangUpCheckRows = 1024

var (
	errStopQuery = errors.New("the limit is reached")
	errNeedsSlot = errors.New("the answer is not small")
	errHungUp    = errors.New("the client hung up")
)

// historyRequest is a query_history in progress.
type historyRequest struct {
	ss     *session
	window HistoryQuery // for Options.History
	set    prober.ModuleSet
	max    int   // items, 0 for no limit
	end    int64 // the end of the window, milliseconds since 1970

	// kept and buf have all items, or for a long answer buf has those that are not written yet.
	// Each part of kept has about writeSize bytes: to extend one slice would copy it, and need twice
	// the memory.
	kept [][]byte
	buf  []byte
	// hasAnswerSlot is set when the request holds the server's answer slot, which it must return.
	hasAnswerSlot bool
	// isLong is set when the items are longer than maxKeptAnswer.
	isLong bool
	rows   int // that the history gave in this pass
	// items and size are the number of items, and their bytes with the commas in between.
	items, size int
	first, last int64 // ts of the first and the last item
}

// history answers query_history. The answer is streamed, so nothing is returned for jrpc2
// to encode. When the history fails before it gave a row, the answer is a snapshot.
func (ss *session) history(ctx context.Context, f *params) (any, error) {
	q := &historyRequest{ss: ss}
	if err := q.parse(f); err != nil {
		return nil, err
	}
	if ss.requestID == "" {
		return nil, nil // a notification has no answer
	}
	defer func() {
		if q.hasAnswerSlot {
			ss.srv.answerSlot <- nil
		}
	}()
	err := q.countPass(ctx)
	if errors.Is(err, errNeedsSlot) {
		if err := q.waitForAnswerSlot(ctx); err != nil {
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
		ss.srv.log.Warn("query_history: answered with a snapshot", zap.Error(err))
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

// parse reads the params. Without modules the started ones are meant.
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
		to = now // so that the second pass has no later rows
	}
	q.window = HistoryQuery{FromMS: from, ToMS: to, StepMS: step, Modules: q.set.Names()}
	q.max = int(min(limit, math.MaxInt32))
	return nil
}

// run queries the history until fn returns an error; errStopQuery is not one of run. A
// window that begins in the future is empty.
func (q *historyRequest) run(ctx context.Context, fn func(*HistoryRow) error) error {
	h := q.ss.srv.o.History
	if h == nil || q.window.ToMS > 0 && q.window.FromMS > q.window.ToMS {
		return nil
	}
	q.rows = 0
	isStopped := false // the history may replace fn's error
	err := h.Query(ctx, q.window, func(row HistoryRow) error {
		if q.rows++; q.rows%hangUpCheckRows == 0 && q.ss.c.isHungUp() {
			return errHungUp
		}
		err := fn(&row)
		isStopped = errors.Is(err, errStopQuery)
		return err
	})
	if isStopped {
		return nil
	}
	return err
}

// appendItem appends a row to buf, after a comma if it is not the first, and returns how
// many bytes it appended.
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

// countPass is the first pass.
func (q *historyRequest) countPass(ctx context.Context) error {
	slot, err := acquire(ctx, q.ss.c, q.ss.srv.countSlots)
	if err != nil {
		return q.queryError(ctx, err)
	}
	defer func() { q.ss.srv.countSlots <- slot }()
	q.kept, q.buf, q.items, q.size = nil, newPart(), 0, 0
	return q.run(ctx, q.count)
}

// newPart returns an empty part with space for the item that exceeds writeSize.
func newPart() []byte { return make([]byte, 0, writeSize+writeSize/16) }

// count adds a row in the first pass.
func (q *historyRequest) count(row *HistoryRow) error {
	switch {
	case q.isLong:
		q.kept, q.buf = nil, q.buf[:0]
	case len(q.buf) >= writeSize:
		q.kept, q.buf = append(q.kept, q.buf), newPart()
	}
	n := q.appendItem(row)
	if n == 0 {
		return nil
	}
	if q.items++; q.items == 1 {
		q.first = row.TS
	}
	q.size, q.last = q.size+n, row.TS
	limit := q.ss.srv.o.answerLimit
	switch {
	case q.length() > limit:
		return errParams("step_ms", "the answer would be longer than %d MiB: ask with step_ms %d or more, or for a shorter window, or with a limit", limit>>20, q.minStep())
	case q.items == q.max:
		return errStopQuery
	case !q.hasAnswerSlot && q.size > maxSmallAnswer && !q.tryAnswerSlot():
		return errNeedsSlot
	}
	q.isLong = q.size > q.ss.srv.o.keptLimit
	return nil
}

// length is that of the whole answer, in bytes.
func (q *historyRequest) length() int {
	return len(answerHead) + len(q.ss.requestID) + len(answerBody) + q.size + len(answerTail)
}

// minStep is the least step, in whole seconds as milliseconds, that makes the answer short
// enough.
func (q *historyRequest) minStep() int64 {
	fitting := q.ss.srv.o.answerLimit / (q.size/q.items + 1) // items of the mean size
	step := (max(q.end, q.last)-q.first)/int64(fitting) + 1
	return (step + 999) / 1000 * 1000
}

// tryAnswerSlot takes the answer slot if it is free. The pass does not wait for it, because it holds
// a count slot.
func (q *historyRequest) tryAnswerSlot() bool {
	select {
	case <-q.ss.srv.answerSlot:
		q.hasAnswerSlot = true
	default:
	}
	return q.hasAnswerSlot
}

// waitForAnswerSlot waits for the answer slot, whose holder may wait for its client. The caller
// holds no count slot meanwhile.
func (q *historyRequest) waitForAnswerSlot(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := acquire(ctx, q.ss.c, q.ss.srv.answerSlot)
	if errors.Is(err, context.DeadlineExceeded) {
		return newError(CodeRateLimited, "another long answer of query_history is being read: try again, or ask with a larger step_ms")
	}
	q.hasAnswerSlot = err == nil
	return err
}

// acquire receives from slots, unless ctx ends or the client hangs up before.
func acquire(ctx context.Context, c *serverChannel, slots <-chan []byte) ([]byte, error) {
	tick := time.Tick(100 * time.Millisecond)
	for {
		select {
		case buf := <-slots:
			return buf, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick:
			if c.isHungUp() {
				return nil, errHungUp
			}
		}
	}
}

// queryError is the error that answers a query which failed with err.
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

// snapshot makes an answer with the present readings, when nothing was recorded.
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

// writeBuffered writes what the first pass kept.
func (q *historyRequest) writeBuffered(context.Context) error {
	return q.ss.c.stream(q.length(), func(write func([]byte) error) error {
		err := write(q.head(nil))
		for _, part := range append(q.kept, q.buf) {
			if err == nil {
				err = write(part)
			}
		}
		return errors.Join(err, write([]byte(answerTail)))
	})
}

// head appends the message up to the first item.
func (q *historyRequest) head(b []byte) []byte {
	return append(append(append(b, answerHead...), q.ss.requestID...), answerBody...)
}

// writeSecondPass writes exactly as many bytes as the first pass counted.
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
		err := q.run(ctx, func(row *HistoryRow) error {
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
