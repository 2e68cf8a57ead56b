package control

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/creachadair/jrpc2"
	"github.com/creachadair/jrpc2/channel"
)

// Errors of a client that callers test for; their text says what to do.
var (
	ErrNotRunning = errors.New("the daemon is not running; start it with: agentctl run")
	ErrPermission = errors.New("permission denied; join group " + Group + " (sudo usermod -aG " + Group + " $USER, then log in again) or use sudo")
	ErrClosed     = errors.New("the daemon closed the connection; see its log, and try again")
)

// dialTimeout bounds Dial, with the hello, when its context has no deadline. A daemon that
// hangs accepts connections still, through the kernel's backlog.
const dialTimeout = 5 * time.Second

// Event is an event of the daemon.
type Event struct {
	// Method is EventMetrics, EventState, …
	Method string
	// Params is the JSON of a Snapshot, a State, …
	Params json.RawMessage
}

// DialOptions of a client. The zero value is for a command without events.
type DialOptions struct {
	// AppVersion is sent to the daemon; default "agentctl".
	AppVersion string
	// Token is what the daemon's configuration requires; default "agentctl", since any
	// will do where none is configured.
	Token string

	// OnEvent is called with the events, in their order, in the goroutine that reads: it
	// must be quick and must not use the client. With it hello names metrics_stream, which
	// enables push for all clients.
	OnEvent func(Event)
}

// Client is a connection to a daemon. Its methods may be called from any goroutine. Calls at
// the same time share the connection; the daemon answers them one after the other, so a slow
// query_history delays the others, and a program that cannot wait dials twice.
//
// The goroutine of jrpc2's client reads messages. It calls OnEvent, and hands answers to the
// callers that wait for them.
type Client struct {
	rpc   *jrpc2.Client
	ch    *clientChannel
	hello Hello
	page  int // historyPage; a test has less
}

// ErrDiskHung reports a state directory whose disk does not answer. A process that used it could not
// even be killed.
var ErrDiskHung = errors.New("the disk of the daemon's state directory does not answer; see: agentctl doctor")

// CheckDisk returns ErrDiskHung where the daemon says that its disk hangs. Commands that use files
// of the state directory themselves call it first.
func (c *Client) CheckDisk(ctx context.Context) error {
	var s struct {
		StateDir struct {
			State string `json:"state"`
		} `json:"state_dir"`
	}
	if err := c.Status(ctx, &s); err == nil && s.StateDir.State == "hung" {
		return ErrDiskHung
	}
	return nil
}

// Dial connects to the daemon at path and says hello. Errors include ErrNotRunning,
// ErrPermission and *Error.
func Dial(ctx context.Context, path string) (*Client, error) {
	return DialOptions{}.Dial(ctx, path)
}

// Dial is the function Dial with options. The caller must call Close, also when it uses the
// client for one call.
func (o DialOptions) Dial(ctx context.Context, path string) (*Client, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, dialTimeout)
		defer cancel()
	}
	nc, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, dialError(path, err)
	}
	c, err := o.open(ctx, nc)
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	return c, nil
}

// open says hello on a new connection.
func (o DialOptions) open(ctx context.Context, nc net.Conn) (*Client, error) {
	ch := &clientChannel{wire: newWire(nc, maxAnswer), onEvent: o.OnEvent, ended: make(chan struct{})}
	c := &Client{rpc: jrpc2.NewClient(ch, nil), ch: ch, page: historyPage}
	p := HelloParams{
		AppVersion:      cmp.Or(o.AppVersion, "agentctl"),
		ProtocolVersion: ProtocolVersion,
		Token:           cmp.Or(o.Token, "agentctl"),
	}
	if o.OnEvent != nil {
		p.Capabilities = []string{CapMetricsStream}
	}
	err := c.Call(ctx, MethodHello, p, &c.hello)
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// dialError maps errors of connect(2) to those whose text says what to do.
func dialError(path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		err = ErrNotRunning
	case errors.Is(err, fs.ErrPermission):
		err = ErrPermission
	}
	return fmt.Errorf("control socket %s: %w", path, err)
}

// Call calls a method and decodes the result into out, which may be nil. An error of the
// daemon is an *Error.
func (c *Client) Call(ctx context.Context, method string, params, out any) error {
	rsp, err := c.rpc.Call(ctx, method, params)
	if err != nil {
		return c.callError(ctx, err)
	}
	if out == nil {
		return nil
	}
	if err := rsp.UnmarshalResult(out); err != nil {
		return fmt.Errorf("the daemon's answer to %s: %w", method, err)
	}
	return nil
}

// callError is why a call failed: the daemon's answer to it, the error that the daemon sent
// before it closed the connection, or the caller's context.
func (c *Client) callError(ctx context.Context, err error) error {
	var je *jrpc2.Error
	if errors.As(err, &je) && je.Code != jrpc2.InternalError {
		var d errorData
		json.Unmarshal(je.Data, &d) // Code and Message suffice when it fails
		return &Error{int(je.Code), je.Message, d.Field, d.Detail, d.Code}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	// jrpc2 reports a closed connection to all calls, and may do so before Recv has read the
	// daemon's last message, which says why.
	select {
	case <-c.ch.ended:
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
	last := c.ch.lastError.Load()
	switch {
	case last == nil:
		return ErrClosed
	case last.Code == CodeUnauthorized:
		return fmt.Errorf("%w (%s)", ErrPermission, last.Message)
	}
	return last
}

// Hello returns the daemon's answer to hello.
func (c *Client) Hello() Hello { return c.hello }

// Snapshot returns the present readings of modules; none: cpu and memory.
func (c *Client) Snapshot(ctx context.Context, modules ...string) (*Snapshot, error) {
	var s Snapshot
	if err := c.Call(ctx, MethodSnapshot, moduleParams{modules}, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

// Status decodes the daemon's status into out.
func (c *Client) Status(ctx context.Context, out any) error {
	return c.Call(ctx, MethodStatus, nil, out)
}

// GetConfig decodes the daemon's configuration, values and their origins, into out.
func (c *Client) GetConfig(ctx context.Context, out any) error {
	return c.Call(ctx, MethodGetConfig, nil, out)
}

// Capabilities decodes what the device announces, {node_id, capabilities}, into out.
func (c *Client) Capabilities(ctx context.Context, out any) error {
	return c.Call(ctx, MethodCapabilities, nil, out)
}

// CallTool calls a tool of the device by its full name; args is an object, nil for an empty
// one. An *Error has the tool's code.
func (c *Client) CallTool(ctx context.Context, tool string, args json.RawMessage) (json.RawMessage, error) {
	var out json.RawMessage
	err := c.Call(ctx, MethodCall, callParams{tool, args}, &out)
	return out, err
}

// History returns what was recorded. The daemon answers with at most 16 MiB; HistoryEach
// returns any number of items.
func (c *Client) History(ctx context.Context, q HistoryQuery) ([]HistoryItem, error) {
	var r struct {
		Items []HistoryItem `json:"items"`
	}
	err := c.Call(ctx, MethodHistory, q, &r)
	return r.Items, err
}

// HistoryEach calls fn with each recorded item, in ascending order. It requests a page of
// historyPage items at a time, so any number of items needs little memory. Each page begins
// after the last item of the one before, so with ToMS 0 what
// is recorded meanwhile is included.
func (c *Client) HistoryEach(ctx context.Context, q HistoryQuery, fn func(HistoryItem) error) error {
	left := q.Limit
	for first := true; ; first = false {
		q.Limit = c.page
		if left > 0 {
			q.Limit = min(left, c.page)
		}
		items, err := c.History(ctx, q)
		if err != nil {
			return err
		}
		if len(items) == 0 || !first && items[0].TS < q.FromMS {
			return nil // an empty window is answered with the newest item
		}
		for _, item := range items {
			if err := fn(item); err != nil {
				return err
			}
		}
		if left -= len(items); len(items) < q.Limit || left == 0 {
			return nil
		}
		last := items[len(items)-1].TS
		if q.FromMS = last + 1; q.StepMS > 0 {
			q.FromMS = last - last%q.StepMS + q.StepMS // the bucket was complete
		}
		if q.ToMS > 0 && q.FromMS > q.ToMS {
			return nil
		}
	}
}

// Start makes the daemon push and record exactly these modules; none: cpu and memory. It
// returns their names as the daemon spells them.
func (c *Client) Start(ctx context.Context, modules ...string) ([]string, error) {
	var r startResult
	err := c.Call(ctx, MethodStart, moduleParams{modules}, &r)
	return r.StartedModules, err
}

// Stop ends push and recording for all clients.
func (c *Client) Stop(ctx context.Context) error {
	return c.Call(ctx, MethodStop, nil, nil)
}

// SetConfig changes cadences for all clients.
func (c *Client) SetConfig(ctx context.Context, cfg Config) (*ConfigResult, error) {
	var r ConfigResult
	if err := c.Call(ctx, MethodSetConfig, cfg, &r); err != nil {
		return nil, err
	}
	return &r, nil
}

// Burst makes metrics come at the interval until the returned time, for all clients.
func (c *Client) Burst(ctx context.Context, interval, ttl time.Duration) (expires time.Time, err error) {
	var r burstResult
	err = c.Call(ctx, MethodBurst, burstParams{interval.Milliseconds(), ttl.Milliseconds()}, &r)
	return time.UnixMilli(r.ExpiresAt), err
}

// SubscribeMetrics enables or disables push for all clients.
func (c *Client) SubscribeMetrics(ctx context.Context, enable bool) error {
	return c.Call(ctx, MethodSubscribe, subscribeParams{enable}, nil)
}

// Done is closed when the daemon has closed the connection, or Close was called.
func (c *Client) Done() <-chan struct{} { return c.ch.ended }

// Close closes the connection and waits for its goroutines.
func (c *Client) Close() error { return c.rpc.Close() }

// moduleParams are the params of snapshot and start.
type moduleParams struct {
	Modules []string `json:"modules,omitempty"`
}

// callParams are the params of call.
type callParams struct {
	Tool      string          `json:"tool"`
	Arguments json.RawMessage `json:"arguments,omitempty"`
}

// burstParams are the params of burst_subscribe.
type burstParams struct {
	IntervalMS int64 `json:"interval_ms"`
	TTLMS      int64 `json:"ttl_ms"`
}

// subscribeParams are the params of subscribe_metrics.
type subscribeParams struct {
	Enable bool `json:"enable"`
}

var _ channel.Channel = (*clientChannel)(nil)

// clientChannel is the channel from which jrpc2's client reads answers. Events do not reach
// the library, which would not keep their order; neither does the error without an id that
// a daemon sends before it closes the connection.
type clientChannel struct {
	*wire
	onEvent   func(Event)
	lastError atomic.Pointer[Error]
	ended     chan struct{} // closed when nothing more will be read
}

// Send writes a request.
func (c *clientChannel) Send(body []byte) error { return c.write(frame(body)) }

// Recv returns the next answer. jrpc2 calls it in one goroutine, until it fails.
func (c *clientChannel) Recv() ([]byte, error) {
	for {
		body, err := c.read()
		if err != nil {
			close(c.ended)
			return nil, io.EOF
		}
		var m struct {
			ID     json.RawMessage `json:"id"`
			Method string          `json:"method"`
			Params json.RawMessage `json:"params"`
			Error  *errorObject    `json:"error"`
		}
		switch err := json.Unmarshal(body, &m); {
		case err == nil && m.Method != "":
			if c.onEvent != nil {
				c.onEvent(Event{m.Method, m.Params})
			}
		case err == nil && m.Error != nil && (m.ID == nil || string(m.ID) == "null"):
			last := &Error{Code: m.Error.Code, Message: m.Error.Message}
			if m.Error.Data != nil {
				last.Field, last.Detail = m.Error.Data.Field, m.Error.Data.Detail
			}
			c.lastError.Store(last)
		default:
			return body, nil
		}
	}
}

// read reads one message. An answer may be up to maxAnswer bytes long, so it gets its own
// memory; jrpc2 keeps it.
func (c *clientChannel) read() ([]byte, error) {
	if err := c.reader.waitMessage(); err != nil {
		return nil, err
	}
	n, err := c.reader.header()
	if err != nil {
		return nil, err
	}
	body := make([]byte, n)
	return body, c.reader.body(body)
}
