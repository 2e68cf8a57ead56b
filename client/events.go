package client

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
	"net/url"
	"strconv"
	"strings"
	"time"

	"agentctl/transport/sse"
)

// Following topics (docs/events.md)
//
// A stream is opened with the id of the last event in Last-Event-ID; the gateway replays the
// events after it. Its first line is the comment ": stream start id=N", where N is the id of
// the next event: a stream that breaks before its first event is resumed at N.
//
//	heartbeat      {"ts": ms}, sent periodically. The interval between two of them determines
//	               how long silence may last before the connection counts as dead.
//	gateway/reset  {"requested", "oldest", "dropped"}: events are missing. With dropped > 0
//	               this reader was too slow and the gateway may still have them: the stream
//	               is opened again. Otherwise they are gone, and "oldest" comes next.
//	anything else  an event; its type is the topic, its data one line of JSON and, when the
//	               gateway signs, a second line with the signature.

// Constants of every event gateway.
const (
	StreamPath   = "/model_context_protocol/2024-11-05/sse"
	IngestPath   = "/model_context_protocol/2024-11-05/events"
	GatewayPort  = "39300" // the default one
	maxPublished = 4096    // bytes read of the answer to a published event
)

// Gateway publishes and follows the topic events of one event gateway.
type Gateway struct{ conn }

// NewGateway makes a client of the gateway at an address with or without a path; defaultPath
// (StreamPath or IngestPath) completes one without. Redirects are not followed. Its errors
// are ErrURL and ErrCleartext.
func NewGateway(o Options, defaultPath string) (*Gateway, error) {
	c, err := newConn(o)
	if err != nil {
		return nil, err
	}
	if c.url.Path == "" || c.url.Path == "/" {
		c.url.Path = defaultPath
	}
	c.http.Transport.(*http.Transport).DisableCompression = true // it would delay events
	c.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Gateway{*c}, nil
}

// Host returns the gateway's host and port.
func (g *Gateway) Host() string { return g.url.Host }

// Publish puts one event into the gateway and returns its id. data is JSON.
//
// A failed request is not repeated: the gateway may have taken the event, and a second one would
// have another id.
func (g *Gateway) Publish(ctx context.Context, topic string, data json.RawMessage) (id json.Number, err error) {
	resp, err := g.do(ctx, http.MethodPost, g.url.String(), "application/json", struct {
		Data  json.RawMessage `json:"data"`
		Topic string          `json:"topic"`
	}{data, topic})
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	var answer struct {
		ID json.Number `json:"id"`
	}
	err = json.NewDecoder(io.LimitReader(resp.Body, maxPublished)).Decode(&answer)
	if err != nil || answer.ID == "" || resp.StatusCode != http.StatusAccepted {
		return "", &ProtocolError{What: fmt.Sprintf("the answer of %s (HTTP %d) has no id", g.Host(), resp.StatusCode)}
	}
	return answer.ID, nil
}

// Event is one event of a topic.
type Event struct {
	ID        string // its number in the gateway's order
	Topic     string
	Data      []byte // JSON
	Signature []byte // JSON; nil unless the gateway signs
}

// MarshalJSON encodes the event as {"id", "topic", "data"}, and "signature" where there is
// one. Data of a server that does not send JSON becomes a string.
func (e Event) MarshalJSON() ([]byte, error) {
	line := struct {
		ID        json.RawMessage `json:"id"`
		Topic     string          `json:"topic"`
		Data      json.RawMessage `json:"data"`
		Signature json.RawMessage `json:"signature,omitempty"`
	}{ID: jsonOrString([]byte(e.ID)), Topic: e.Topic, Data: jsonOrString(e.Data)}
	if len(e.Signature) > 0 {
		line.Signature = jsonOrString(e.Signature)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // the caller's encoder decides
	err := enc.Encode(line)
	return b.Bytes(), err
}

// jsonOrString returns b when it is JSON, else b as a JSON string.
func jsonOrString(b []byte) json.RawMessage {
	if json.Valid(b) {
		return b
	}
	s, _ := json.Marshal(string(b)) // a string always encodes
	return s
}

// TailOptions select the events to follow.
type TailOptions struct {
	Topics []string // log/* is every topic below log; none: all topics
	After  string   // begin after the event with this id; "0": with the oldest; "": from now on

	OnEvent  func(Event) error   // ErrStop ends the tail without an error, another one with it
	OnNotice func(notice string) // reports to a person: a lost connection, missing events
}

// Tail follows topics until ctx ends. A connection that breaks is opened again after the
// last event, so that no event is missed as long as the gateway has it. The first attempt
// must reach the gateway; after that, failures of the connection are retried forever, and
// answers 429 and 5xx always.
//
// It returns nil when OnEvent returned ErrStop, and when ctx ended after the gateway had
// answered; ctx's error when it never did.
func (g *Gateway) Tail(ctx context.Context, o TailOptions) error {
	t := &tail{gateway: g, TailOptions: o, last: o.After, fromOldest: o.After == "0"}
	target := *g.url
	if len(o.Topics) > 0 {
		q := target.Query()
		q.Set("topics", strings.Join(o.Topics, ","))
		target.RawQuery = q.Encode()
	}
	t.target = &target
	return t.run(ctx)
}

// tail is the state of one Tail. It belongs to the goroutine that called Tail.
type tail struct {
	TailOptions
	gateway *Gateway
	target  *url.URL

	last       string        // the id to resume after; "" is from now on
	fromOldest bool          // the tail began with the oldest event, and none has arrived yet
	connected  bool          // at least once
	problem    string        // the last notice about a broken connection; "" while it is up
	maxSilence time.Duration // after which the connection counts as dead; 0: not known yet
	beatMS     int64         // gateway's time in the last heartbeat
}

// errDropped is the interruption after the gateway dropped events for this reader.
var errDropped = errors.New("this reader was too slow")

// interruption is a reason to connect again. Any other error ends the tail.
type interruption struct{ error }

func (i interruption) Unwrap() error { return i.error }

// run reopens the stream whenever it breaks. The back-off starts over after an attempt that
// delivered an event. If the gateway dropped events because this reader was slow, run
// reconnects at once, unless the stream made no progress.
func (t *tail) run(ctx context.Context) error {
	var retry backoff
	for {
		before := t.last
		err := t.stream(ctx)
		var again interruption
		switch {
		case errors.Is(err, ErrStop):
			return nil
		case ctx.Err() != nil && t.connected:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case !errors.As(err, &again):
			return err
		}
		if t.last != before { // the stream made progress
			retry.reset()
		}
		wait := retry.next(err)
		if errors.Is(err, errDropped) && t.last != before {
			wait = 0
		}
		if what := err.Error(); wait > 0 && what != t.problem { // each problem once
			t.notice("%s; connecting again", what)
			t.problem = what
		}
		sleep(ctx, wait) // when ctx ends meanwhile, the next attempt reports it
	}
}

// notice reports something to a person.
func (t *tail) notice(format string, args ...any) {
	if t.OnNotice != nil {
		t.OnNotice(fmt.Sprintf(format, args...))
	}
}

// stream opens the stream and delivers its events until it breaks.
func (t *tail) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resp, err := t.open(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if t.connected, t.maxSilence, t.beatMS = true, 0, 0; t.problem != "" {
		t.notice("connected again")
		t.problem = ""
	}
	// The hour bounds readStart only: the loop sets or stops the timer before each event.
	silence := time.AfterFunc(time.Hour, cancel) // ends the read below
	defer silence.Stop()
	body := bufio.NewReader(resp.Body)
	t.readStart(body)
	reader := sse.NewReader(body, sse.ReaderOptions{})
	for {
		if t.maxSilence > 0 {
			silence.Reset(t.maxSilence)
		} else {
			silence.Stop()
		}
		ev, err := reader.Next()
		switch {
		case errors.Is(err, sse.ErrTooLong):
			return &ProtocolError{What: fmt.Sprintf("an event of %s is too long", t.target.Host)}
		case err != nil && ctx.Err() != nil:
			return interruption{fmt.Errorf("nothing was received for %s, not even heartbeats", t.maxSilence.Round(time.Second))}
		case err != nil:
			return interruption{fmt.Errorf("the connection broke (%w)", err)}
		}
		if err := t.handle(ev); err != nil {
			return err
		}
	}
}

// open sends the request of a stream.
func (t *tail) open(ctx context.Context) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.target.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("Cache-Control", "no-cache")
	if t.last != "" {
		req.Header.Set("Last-Event-ID", t.last)
	}
	resp, err := t.gateway.send(req)
	var answer *Error
	var transport *TransportError
	switch {
	case errors.As(err, &answer) && answer.isTemporary(), errors.As(err, &transport) && t.connected:
		return nil, interruption{err}
	case transport == nil && t.connected && isTemporaryRefresh(err):
		return nil, interruption{err}
	case err != nil:
		return nil, err
	}
	if err := wantEventStream(resp); err != nil {
		_ = resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// readStart reads the first line of the stream, and no further: the next event may be hours
// away.
func (t *tail) readStart(r *bufio.Reader) {
	const maxLine = 64
	var line []byte
	for err := error(nil); len(line) < maxLine && err == nil && bytes.IndexByte(line, '\n') < 0; {
		_, err = r.Peek(len(line) + 1)
		line, _ = r.Peek(min(r.Buffered(), maxLine)) // what has arrived, without waiting for more
	}
	first, _, whole := bytes.Cut(line, []byte("\n"))
	digits, ok := bytes.CutPrefix(first, []byte(": stream start id="))
	next, err := strconv.ParseUint(string(bytes.TrimRight(digits, "\r")), 10, 63)
	if whole && ok && err == nil && next > 0 && t.last == "" {
		t.last = strconv.FormatUint(next-1, 10)
	}
}

// handle processes one event of the stream.
func (t *tail) handle(ev sse.Event) error {
	switch ev.Type {
	case "heartbeat":
		t.heartbeat(ev.Data)
		return nil
	case "gateway/reset":
		return t.reset(ev.Data)
	}
	data, signature, _ := bytes.Cut(ev.Data, []byte{'\n'})
	err := t.OnEvent(Event{ID: ev.LastEventID, Topic: ev.Type, Data: data, Signature: signature})
	t.last, t.fromOldest = cmp.Or(ev.LastEventID, t.last), false
	return err
}

// heartbeat sets how long silence may last: three heartbeat intervals and 5 s. It compares
// the times in the heartbeats, not their arrival times, since several may arrive together.
func (t *tail) heartbeat(data []byte) {
	var beat struct {
		TS int64 `json:"ts"`
	}
	if json.Unmarshal(data, &beat) != nil || beat.TS <= 0 {
		return
	}
	if gap := beat.TS - t.beatMS; t.beatMS > 0 && gap > 0 && gap <= time.Hour.Milliseconds() {
		t.maxSilence = 3*time.Duration(gap)*time.Millisecond + 5*time.Second
	}
	t.beatMS = beat.TS
}

// reset handles gateway/reset: events are missing before the next one.
func (t *tail) reset(data []byte) error {
	var r struct {
		Requested json.Number `json:"requested"`
		Oldest    uint64      `json:"oldest"`
		Dropped   uint64      `json:"dropped"`
	}
	if json.Unmarshal(data, &r) != nil {
		return nil // a newer gateway's
	}
	if r.Dropped > 0 && t.last != "" {
		t.notice("this reader was too slow for %d events; asking for them again", r.Dropped)
		return interruption{errDropped}
	}
	if !t.fromOldest {
		t.notice("the gateway no longer has what came after %s; events may be missing here, the next is %d or later",
			cmp.Or(r.Requested.String(), "that id"), r.Oldest)
	}
	if r.Oldest > 0 { // what came before is gone: do not ask for it again
		t.last = strconv.FormatUint(r.Oldest-1, 10)
	}
	return nil
}
