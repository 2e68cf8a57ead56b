package stdio

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Bounds and times.
const (
	maxLine      = 1 << 20          // a message of the client, bytes; /mcp takes no more
	maxAnswer    = 16 << 20         // a message of the server, bytes
	maxInFlight  = 64               // requests at a time; the next line is handled when one has ended
	drainTimeout = 10 * time.Second // for requests in flight when the client's input has ended
)

// Options configure Serve. Only URL is required.
type Options struct {
	URL    string       // of the MCP endpoint, query included
	Client *http.Client // default http.DefaultClient
	// Token, unless nil, returns the token of each request. refused is the token that the server
	// has just answered with 401, "" at first; the request is sent once more if another one is
	// returned. It is called concurrently.
	Token     func(ctx context.Context, refused string) (string, error)
	TokenHint string      // the source of the token; appended to the message of a 401
	Logger    *zap.Logger // default none; must not write to stdout, which is the client's
}

// bridge is one Serve. The locks are leaves: no HTTP request is made while one is held, and
// outMu is held for a write to stdout alone. renewSlot is taken without them.
type bridge struct {
	opts         Options
	log          *zap.Logger
	wg           sync.WaitGroup // requests and listen
	slots        chan struct{}  // filled by requests in flight
	requestEnded chan struct{}  // holds one signal: a request has ended
	renewSlot    chan struct{}  // holds one: who fills it renews the session

	outMu  sync.Mutex // protects the fields below
	out    io.Writer
	outErr error // of the first write that failed

	mu       sync.Mutex          // protects the fields below
	inFlight map[string]*request // by the JSON of the id: 1 and "1" are different ids
	// pending is not the length of inFlight: a client may use an id again before its request has ended
	// here, and a stream of subscriptions/listen does not count.
	pending int // requests that end by themselves and have not ended
	session session

	readOnly    map[string]bool // tools that only read, of every tools/list; see isReadOnly
	hasAnswered bool            // the relay has answered a request
	outageAt    time.Time       // when it last became unreachable or stopped; zero: never
}

// request is a client's request that waits for its answer.
type request struct {
	cancel       context.CancelFunc
	isModern     bool
	endsByItself bool // a listen stream does not
}

// Serve carries messages between a client and a server until in ends or ctx does. After the
// end of in, requests in flight are still answered, for drainTimeout at most. The error is
// that of ctx, of reading in, or of writing out.
func Serve(ctx context.Context, in io.Reader, out io.Writer, o Options) error {
	o.Client = cmp.Or(o.Client, http.DefaultClient)
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	ctx, cancel := context.WithCancel(ctx)
	b := &bridge{opts: o, log: o.Logger, out: newAbortableWriter(ctx, out), slots: make(chan struct{}, maxInFlight),
		requestEnded: make(chan struct{}, 1), renewSlot: make(chan struct{}, 1), inFlight: make(map[string]*request), readOnly: make(map[string]bool)}
	defer b.wg.Wait()
	defer cancel()
	lines := make(chan []byte)
	inputEnded := make(chan error, 1)
	go func() { inputEnded <- readLines(ctx, in, lines) }() // not waited for: a read cannot be interrupted
	for {
		select {
		case line := <-lines:
			if err := b.handleLine(ctx, line); err != nil {
				return err
			}
		case err := <-inputEnded:
			if err == nil {
				b.drain(ctx)
			}
			b.closeSession(ctx)
			return err
		case <-ctx.Done():
			b.closeSession(ctx)
			return ctx.Err()
		}
	}
}

// readLines sends the lines of in to a channel, which is not buffered: while a notification
// is being delivered or 64 requests are in flight, the client's pipe fills and the client
// waits. Empty lines are skipped. A line that is too long is sent as nil.
func readLines(ctx context.Context, in io.Reader, to chan<- []byte) error {
	br := bufio.NewReaderSize(in, 64<<10)
	for {
		line, err := readLine(br)
		tooLong := errors.Is(err, bufio.ErrTooLong)
		if line = bytes.TrimSpace(line); len(line) > 0 || tooLong {
			if tooLong {
				line = nil
			}
			select {
			case to <- line:
			case <-ctx.Done():
				return nil
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && !tooLong:
			return fmt.Errorf("read stdin: %w", err)
		}
	}
}

// readLine reads one line. It skips the rest of a line that is longer than maxLine, and
// returns bufio.ErrTooLong: the next line can still be handled.
func readLine(br *bufio.Reader) (line []byte, err error) {
	for tooLong := false; ; {
		part, more, err := br.ReadLine()
		if tooLong = tooLong || len(line)+len(part) > maxLine; tooLong {
			line = nil
		} else {
			line = append(line, part...)
		}
		if err == nil && !more && tooLong {
			err = bufio.ErrTooLong
		}
		if err != nil || !more {
			return line, err
		}
	}
}

// handleLine carries one message of the client:
//
//	initialize                a new session, before the next line is read
//	notifications/cancelled   modern era: cancels the request here; else it is forwarded
//	a request                 in a goroutine
//	anything else             forwarded, before the next line is read
//	not a message             answered with an error under id null
//
// It returns an error when the client's output is broken.
func (b *bridge) handleLine(ctx context.Context, line []byte) error {
	m, err := (*message)(nil), error(nil)
	if line != nil {
		m, err = parseMessage(line)
	}
	switch {
	case line == nil:
		b.writeError(nil, codeInvalid, "the message is larger than 1 MiB")
	case err != nil:
		b.writeError(nil, codeParse, err.Error())
	case m.Method == "initialize" && len(m.ID) > 0:
		b.initialize(ctx, m)
	case m.Method == "notifications/cancelled" && b.cancelRequest(m):
	case m.isRequest():
		b.startRequest(ctx, m)
	default: // a notification, or an answer to the server: delivered before the next line is read
		if _, err := b.post(ctx, m); err != nil {
			b.log.Warn("mcp message lost", zap.String("method", m.Method), zap.String("error", b.describeError(err)))
		}
		if m.Method == "notifications/initialized" {
			b.startListening(ctx)
		}
	}
	b.outMu.Lock()
	defer b.outMu.Unlock()
	if b.outErr != nil {
		return fmt.Errorf("write stdout: %w", b.outErr)
	}
	return nil
}

// startRequest runs a request in a goroutine, beside others. It waits for a slot, so a
// client that does not wait for answers is slowed down. A second request under an id that
// is in flight is refused: its answer would look like the first one's.
func (b *bridge) startRequest(ctx context.Context, m *message) {
	select {
	case b.slots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	key := string(m.ID)
	b.mu.Lock()
	isDuplicate := b.inFlight[key] != nil
	r := &request{cancel: cancel, isModern: m.version != "", endsByItself: m.Method != "subscriptions/listen"}
	if !isDuplicate {
		b.inFlight[key] = r
		if r.endsByItself {
			b.pending++
		}
	}
	b.mu.Unlock()
	if isDuplicate {
		cancel()
		<-b.slots
		b.writeError(m.ID, codeInvalid, "a request with this id is in progress")
		return
	}
	b.wg.Go(func() {
		defer func() {
			cancel()
			b.mu.Lock()
			if b.inFlight[key] == r {
				delete(b.inFlight, key)
			}
			if r.endsByItself {
				b.pending--
			}
			b.mu.Unlock()
			select {
			case b.requestEnded <- struct{}{}:
			default:
			}
			<-b.slots
		}()
		answered, err := b.post(ctx, m)
		if err == nil && !answered {
			err = errNoAnswer
		}
		if err != nil && ctx.Err() == nil { // a canceled request gets no answer
			b.freeID(m.ID)
			b.answerError(m.ID, err)
		}
	})
}

// freeID allows the id of a request again. It is called before the answer is written: the
// client may reuse the id as soon as it has read that. The id of a listen stream stays, since
// a cancellation finds the stream by it.
func (b *bridge) freeID(id json.RawMessage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := b.inFlight[string(id)]; r != nil && r.endsByItself {
		delete(b.inFlight, string(id))
	}
}

// cancelRequest cancels a request of the era without sessions by closing its connection, as
// that version wants. In a session the notification itself goes to the server.
func (b *bridge) cancelRequest(m *message) bool {
	var p struct {
		RequestID json.RawMessage `json:"requestId"`
	}
	if json.Unmarshal(m.Params, &p) != nil {
		return false
	}
	b.mu.Lock()
	r := b.inFlight[string(p.RequestID)]
	b.mu.Unlock()
	if r == nil || !r.isModern {
		return false
	}
	r.cancel()
	return true
}

// drain waits for the requests in flight that end by themselves, so that a pipe that closes
// after its last request still gets the answers.
func (b *bridge) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	for b.isBusy() {
		select {
		case <-b.requestEnded:
		case <-ctx.Done():
			return
		}
	}
}

// isBusy reports whether a request is in flight that ends by itself.
func (b *bridge) isBusy() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pending > 0
}

// write writes one message as a line: a line break inside a message of the server is JSON
// white space, and is removed. After a write that failed it does nothing, and handleLine
// ends Serve.
func (b *bridge) write(msg []byte) {
	var line bytes.Buffer
	if json.Compact(&line, msg) != nil {
		b.log.Warn("the server sent a message that is not JSON")
		return
	}
	line.WriteByte('\n')
	b.outMu.Lock()
	defer b.outMu.Unlock()
	if b.outErr == nil {
		_, b.outErr = b.out.Write(line.Bytes())
	}
}
