package stdio

import (
	"bufio"
	"bytes"
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
	maxInFlight  = 64               // requests at a time; the next is read when one has ended
	drainTimeout = 10 * time.Second // for requests in flight when the client's input has ended
)

// Options configure Serve. URL must be given.
type Options struct {
	URL    string // of the MCP endpoint, query included
	Client *http.Client
	Token  func() (string, error) // asked before each request; nil: none is sent
	Logger *zap.Logger            // default none; never stdout, which is the client's
}

// bridge is one Serve.
type bridge struct {
	opts         Options
	log          *zap.Logger
	wg           sync.WaitGroup
	slots        chan struct{} // one for each request that may still begin
	requestEnded chan struct{} // signalled when a request has ended

	outMu  sync.Mutex // protects out
	out    io.Writer
	outErr error // of the first write that failed

	mu       sync.Mutex // protects the fields below
	inFlight map[string]*request
	session  session
}

// startRequest is one that waits for its answer.
type request struct {
	cancel       context.CancelFunc
	modern       bool
	endsByItself bool // by itself; a listen stream does not
}

// Serve carries messages until in ends or ctx does. After the end of in, requests in
// flight are still answered, for a while. The error is that of ctx, of reading in, or of
// writing out.
func Serve(ctx context.Context, in io.Reader, out io.Writer, o Options) error {
	if o.Client == nil {
		o.Client = http.DefaultClient
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	ctx, cancel := context.WithCancel(ctx)
	b := &bridge{opts: o, log: o.Logger, out: newAbortableWriter(ctx, out), slots: make(chan struct{}, maxInFlight), requestEnded: make(chan struct{}, 1), inFlight: make(map[string]*request)}
	defer b.wg.Wait()
	defer cancel()
	// Reading cannot be interrupted, so it is not waited for: it ends with the process,
	// or when its owner closes in.
	read := make(chan []byte)
	failed := make(chan error, 1)
	go func() { failed <- readLines(ctx, in, read) }()
	for {
		select {
		case line := <-read:
			if err := b.handleLine(ctx, line); err != nil {
				return err
			}
		case err := <-failed:
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

// readLines hands the lines of in on. One that is too long is handed on as nil.
func readLines(ctx context.Context, in io.Reader, to chan<- []byte) error {
	br := bufio.NewReaderSize(in, 64<<10)
	for {
		line, err := readLine(br)
		if line = bytes.TrimSpace(line); len(line) > 0 || errors.Is(err, bufio.ErrTooLong) {
			if errors.Is(err, bufio.ErrTooLong) {
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
		case err != nil && !errors.Is(err, bufio.ErrTooLong):
			return fmt.Errorf("read stdin: %w", err)
		}
	}
}

// readLine reads one line, and skips what is beyond maxLine.
func readLine(br *bufio.Reader) (line []byte, err error) {
	for tooLong := false; ; {
		part, more, err := br.ReadLine()
		if !tooLong {
			line = append(line, part...)
		}
		if len(line) > maxLine {
			tooLong, line = true, nil
		}
		if err != nil || !more {
			if tooLong && err == nil {
				err = bufio.ErrTooLong
			}
			return line, err
		}
	}
}

// handleLine carries one message of the client.
func (b *bridge) handleLine(ctx context.Context, line []byte) error {
	if line == nil {
		b.writeError(nil, codeInvalid, "the message is larger than 1 MiB")
		return b.outputError()
	}
	m, err := parseMessage(line)
	if err != nil {
		b.writeError(nil, codeParse, err.Error())
		return b.outputError()
	}
	switch {
	case m.Method == "initialize" && len(m.ID) > 0:
		b.initialize(ctx, m)
	case m.Method == "notifications/cancelled" && b.cancelRequest(m):
	case len(m.ID) > 0 && m.Method != "":
		b.startRequest(ctx, m)
	default: // a notification, or an answer to the server
		if m.Method == "notifications/initialized" {
			defer b.listen(ctx)
		}
		if _, err := b.post(ctx, m); err != nil {
			b.log.Warn("mcp message lost", zap.String("method", m.Method), zap.String("error", b.describeError(err)))
		}
	}
	return b.outputError()
}

// startRequest runs a request beside the others.
func (b *bridge) startRequest(ctx context.Context, m *message) {
	select {
	case b.slots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &request{cancel: cancel, modern: m.version != "", endsByItself: m.Method != "subscriptions/listen"}
	key := string(m.ID)
	b.mu.Lock()
	_, twice := b.inFlight[key]
	if !twice {
		b.inFlight[key] = r
	}
	b.mu.Unlock()
	if twice {
		cancel()
		<-b.slots
		b.writeError(m.ID, codeInvalid, "a request with this id is in progress")
		return
	}
	b.wg.Go(func() {
		defer func() {
			cancel()
			b.mu.Lock()
			delete(b.inFlight, key)
			b.mu.Unlock()
			select {
			case b.requestEnded <- struct{}{}:
			default:
			}
			<-b.slots
		}()
		answered, err := b.post(ctx, m)
		if err == nil && !answered {
			err = errors.New("the server ended the stream without an answer")
		}
		switch {
		case ctx.Err() != nil: // cancelRequest: the client wants no answer
		case err != nil:
			b.answerError(m.ID, err)
		}
	})
}

// cancelRequest ends a request of the modern era, where hanging up is the way to cancel. In
// sessions the notification itself goes to the server.
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
	if r == nil || !r.modern {
		return false
	}
	r.cancel()
	return true
}

// drain waits for the requests in flight that end by themselves.
func (b *bridge) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	for {
		b.mu.Lock()
		left := 0
		for _, r := range b.inFlight {
			if r.endsByItself {
				left++
			}
		}
		b.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-b.requestEnded:
		case <-ctx.Done():
			return
		}
	}
}

// write writes one message as a line.
func (b *bridge) write(msg []byte) {
	var line bytes.Buffer
	if json.Compact(&line, msg) != nil {
		b.log.Warn("the server sent a message that is no JSON")
		return
	}
	line.WriteByte('\n')
	b.outMu.Lock()
	defer b.outMu.Unlock()
	if b.outErr == nil {
		_, b.outErr = b.out.Write(line.Bytes())
	}
}

// outputError is why the client gets nothing any more.
func (b *bridge) outputError() error {
	b.outMu.Lock()
	defer b.outMu.Unlock()
	if b.outErr != nil {
		return fmt.Errorf("write stdout: %w", b.outErr)
	}
	return nil
}
