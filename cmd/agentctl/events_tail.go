package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/manifest"
	"agentctl/term"
	"agentctl/transport/edge"
	"agentctl/transport/sse"
)

// What every build knows of the event gateway (docs/events.md).
const (
	eventsStreamPath = "/model_context_protocol/2024-11-05/sse"
	eventsIngestPath = "/model_context_protocol/2024-11-05/events"
	eventsPort       = "39300"
)

// eventsVar is one of the gateway's variables, or what the file holds that NAME_FILE names.
func eventsVar(name string) (string, error) {
	if v := os.Getenv(name); v != "" {
		return v, nil
	}
	path := os.Getenv(name + "_FILE")
	if path == "" {
		return "", nil
	}
	v, err := readToken(path)
	if err != nil {
		return "", fmt.Errorf("%s_FILE: %w", name, err)
	}
	return v, nil
}

// eventsURL completes an address of the gateway: a whole URL, or one without a path.
func eventsURL(s, path string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("%q is not of the form http://HOST:PORT", s)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = path
	}
	return u, nil
}

// inTheClear: a token would be sent where others can read it.
func inTheClear(u *url.URL, token string) bool {
	return token != "" && u.Scheme == "http" && !edge.IsLoopback(u.Hostname())
}

func newEventsTail() *cobra.Command {
	t := &tail{}
	var rf relayFlags
	var out output
	var address, since string
	var topics []string
	var dur time.Duration
	c := &cobra.Command{
		Use:   "tail",
		Short: "Follow the event gateway's topics; reconnects and resumes by itself",
		Long: `Follow the topics of an event gateway: a readable line for each event on a terminal, one JSON
object a line elsewhere: {"id":N,"topic":"a/b","data":...}, and "signature" where the gateway
signs. A connection that breaks is opened again with the last id, so that nothing is missed
as long as the gateway still has it; when it does not, stderr says so.

The gateway is that of --url, or the one of the relay's host: port MCP_SSE_PORT or 39300. A
token comes from --token-file, MCP_SSE_AUTH_TOKEN or AGENTCTL_TOKEN_FILE, in this order.

Exit codes: 0 at the end of --count or --for and on Ctrl-C; 3 when nothing answers at the
start; 4 for a token that is not good; 7 when --for ends before --count.`,
		Example: `  agentctl events tail
  agentctl events tail --topics alert,ticket,log/* --since 0
  agentctl events tail --url https://relay.example:39300 --token-file agent.token -o ndjson | jq .data`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if out.format != "" && out.format != "ndjson" {
				return exit(exitUsage, "events tail streams: use -o ndjson")
			}
			if err := checkEnd(dur, t.count); err != nil {
				return err
			}
			if since != "" {
				if _, err := strconv.ParseUint(since, 10, 63); err != nil {
					return exit(exitUsage, "--since takes an event's id, or 0 for all that the gateway has")
				}
			}
			if err := t.aim(cmd, &rf, address, topics); err != nil {
				return err
			}
			t.last, t.all = since, since == "0"
			f, _ := cmd.OutOrStdout().(*os.File)
			t.out, t.say = cmd.OutOrStdout(), cmd.ErrOrStderr()
			t.human = out.format == "" && f != nil && term.IsTerminal(f)
			ctx, cancel := cmd.Context(), context.CancelFunc(func() {})
			if dur > 0 {
				ctx, cancel = context.WithTimeout(ctx, dur)
			}
			defer cancel()
			return t.run(ctx)
		},
	}
	rf.flags(c)
	f := c.Flags()
	f.StringVar(&address, "url", env("AGENTCTL_EVENTS_URL", ""), "`URL` of the gateway, with or without the stream's path [AGENTCTL_EVENTS_URL]")
	f.StringSliceVar(&topics, "topics", nil, "only these `TOPICS`; log/* is all below log (default: all)")
	f.StringVar(&since, "since", "", "begin after the event `ID`; 0: with all that the gateway has (default: with what comes)")
	f.IntVar(&t.count, "count", 0, "end after `N` events (0: never)")
	f.DurationVar(&dur, "for", 0, "end after `DURATION` (0: never)")
	f.VarP((*formatFlag)(&out.format), "output", "o", "print `FORMAT` also on a terminal: ndjson")
	return c
}

// Bounds of a tail.
const (
	tailFirstWait = 250 * time.Millisecond // before the second attempt; doubled from there
	tailMostWait  = 15 * time.Second
	tailMaxWait   = time.Minute // of what a server may ask for with Retry-After
	tailHeadTime  = 15 * time.Second
)

// tail follows one gateway.
type tail struct {
	url        *url.URL
	token      string
	client     *http.Client
	count      int
	human, all bool
	out, say   io.Writer
	last       string // the id to resume after; "" is from now on
	printed    int
	connected  bool          // at least once
	told       string        // what was said last about a connection that is down; "" while it is up
	quiet      time.Duration // silence after which the connection counts as dead; 0: not known yet
	beatMS     int64         // the last heartbeat's time, by the gateway's clock
}

// errGap: the gateway dropped events for this reader; it may still have them.
var errGap = errors.New("this reader was too slow")

// aim decides where to connect and as whom.
func (t *tail) aim(cmd *cobra.Command, rf *relayFlags, address string, topics []string) error {
	byURL, byRelay := cmd.Flags().Changed("url"), cmd.Flags().Changed("relay")
	if byURL && byRelay {
		return exit(exitUsage, "give either --url or --relay")
	}
	if address == "" || byRelay {
		u, err := url.Parse(rf.relay)
		if err != nil || u.Host == "" {
			return exit(exitUsage, "--relay %q is not of the form https://HOST[:PORT]", rf.relay)
		}
		address = u.Scheme + "://" + net.JoinHostPort(u.Hostname(), env("MCP_SSE_PORT", eventsPort))
	}
	u, err := eventsURL(address, eventsStreamPath)
	if err != nil {
		return exit(exitUsage, "--url %w", err)
	}
	if len(topics) > 0 {
		q := u.Query()
		q.Set("topics", strings.Join(topics, ","))
		u.RawQuery = q.Encode()
	}
	t.url = u
	if !cmd.Flags().Changed("token-file") {
		if t.token, err = eventsVar("MCP_SSE_AUTH_TOKEN"); err != nil {
			return exit(exitFailure, "%w", err)
		}
	}
	if t.token == "" && rf.tokenFile != "" {
		if t.token, err = readToken(rf.tokenFile); err != nil {
			return exit(exitFailure, "%w", err)
		}
	}
	if inTheClear(u, t.token) {
		return exit(exitUsage, "refusing to send a token to %s in the clear; use https://", u.Host)
	}
	cfg, err := config.ClientTLS(rf.caFile)
	if err != nil {
		return exit(exitFailure, "%w", err)
	}
	tr := http.DefaultTransport.(*http.Transport).Clone()
	tr.TLSClientConfig, tr.ForceAttemptHTTP2, tr.ResponseHeaderTimeout, tr.DisableCompression = cfg, false, tailHeadTime, true
	t.client = &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return nil
}

// run connects again and again until ctx ends or there is no sense in it.
func (t *tail) run(ctx context.Context) error {
	wait := tailFirstWait
	for {
		before := t.last
		err := t.once(ctx)
		var e *exitError
		switch {
		case errors.Is(err, errEnough):
			return nil
		case ctx.Err() != nil:
			return t.ended(ctx)
		case errors.As(err, &e):
			return err
		}
		if t.last != before {
			wait = tailFirstWait
		}
		pause := wait/2 + rand.N(wait/2)
		if errors.Is(err, errGap) && t.last != before {
			pause = 0
		}
		var later *retryLater
		if errors.As(err, &later) {
			pause = max(pause, min(later.after, tailMaxWait))
		}
		if what := term.SafeLine(err.Error()); pause > 0 && what != t.told { // once for each thing that is wrong
			fmt.Fprintf(t.say, "agentctl: %s; connecting again\n", what)
			t.told = what
		}
		select {
		case <-ctx.Done():
			return t.ended(ctx)
		case <-time.After(pause):
		}
		wait = min(2*wait, tailMostWait)
	}
}

// ended is the end by --for or by a signal.
func (t *tail) ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) && t.count > 0 {
		return exit(exitTimeout, "%d of %d events came within the time of --for", t.printed, t.count)
	}
	if !t.connected && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return exit(exitTimeout, "the gateway at %s did not answer within the time of --for", t.url.Host)
	}
	return nil
}

// retryLater is an answer that may be another one later.
type retryLater struct {
	after time.Duration
	what  string
}

func (e *retryLater) Error() string { return e.what }

// once opens the stream and prints it until it breaks. An exitError is for good.
func (t *tail) once(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.url.String(), nil)
	if err != nil {
		return exit(exitUsage, "%w", err)
	}
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("Cache-Control", "no-cache")
	if t.last != "" {
		req.Header.Set("Last-Event-ID", t.last)
	}
	if t.token != "" {
		req.Header.Set("Authorization", "Bearer "+t.token)
	}
	resp, err := t.client.Do(req)
	if err != nil {
		return t.unreachable(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return eventsAnswer(resp, t.token != "", "subscribe")
	}
	if ct := resp.Header.Get("Content-Type"); !strings.HasPrefix(ct, "text/event-stream") {
		return exit(exitFailure, "%s answered with %q, not with an event stream; is this the event gateway?", t.url.Host, ct)
	}
	t.connected, t.quiet, t.beatMS = true, 0, 0
	if t.told != "" {
		fmt.Fprintln(t.say, "agentctl: connected again")
		t.told = ""
	}
	alive := time.AfterFunc(time.Hour, cancel) // ends the reading below
	defer alive.Stop()
	body := bufio.NewReader(resp.Body)
	t.begin(body)
	rd := sse.NewReader(body, sse.ReaderOptions{})
	for {
		if t.quiet > 0 {
			alive.Reset(t.quiet)
		} else {
			alive.Stop()
		}
		ev, err := rd.Next()
		switch {
		case errors.Is(err, sse.ErrTooLong):
			return exit(exitFailure, "an event of %s is too long; is this the event gateway?", t.url.Host)
		case err != nil && ctx.Err() != nil:
			return fmt.Errorf("nothing came for %s, not even heartbeats", t.quiet.Round(time.Second))
		case err != nil:
			return fmt.Errorf("the connection broke (%w)", err)
		}
		if err := t.event(ev); err != nil {
			return err
		}
	}
}

// begin reads the first line, ": stream start id=N": without an event the stream is to be
// resumed before N.
func (t *tail) begin(r *bufio.Reader) {
	var line []byte
	for n, err := 1, error(nil); n <= 64 && err == nil && bytes.IndexByte(line, '\n') < 0; n = max(n, r.Buffered()) + 1 {
		line, err = r.Peek(n)
	}
	first, _, whole := bytes.Cut(line, []byte("\n"))
	num, ok := bytes.CutPrefix(first, []byte(": stream start id="))
	if n, err := strconv.ParseUint(string(bytes.TrimRight(num, "\r")), 10, 63); whole && ok && err == nil && n > 0 && t.last == "" {
		t.last = strconv.FormatUint(n-1, 10)
	}
}

// unreachable: at the start it is told at once, later it is tried again.
func (t *tail) unreachable(err error) error {
	var op *net.OpError
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	switch {
	case t.connected:
		return err
	case errors.As(err, &op) && op.Op == "dial":
		return exit(exitNotRunning, "no event gateway answers at %s (%w); start one with: agentctl events serve, or name it with --url", t.url.Host, op.Err)
	}
	return exit(exitFailure, "connect to the event gateway at %s: %w", t.url.Host, err)
}

// eventsAnswer is what an answer of the gateway other than 2xx means.
func eventsAnswer(resp *http.Response, token bool, scope string) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var env struct {
		Error struct {
			Code    manifest.Code `json:"code"`
			Message string        `json:"message"`
			TraceID string        `json:"trace_id"`
		} `json:"error"`
	}
	if json.Unmarshal(b, &env) != nil || env.Error.Code == "" {
		env.Error.Message = "no agentctl error; is this the event gateway?"
	}
	what := fmt.Sprintf("HTTP %d %s: %s", resp.StatusCode, env.Error.Code, term.SafeLine(env.Error.Message))
	switch {
	case resp.StatusCode == http.StatusUnauthorized && !token:
		return exit(exitUnauthorized, "%s; pass a token with --token-file, or set MCP_SSE_AUTH_TOKEN", what)
	case resp.StatusCode == http.StatusUnauthorized:
		return exit(exitUnauthorized, "%s; use the gateway's token, or mint one on the relay with: agentctl token create --scope events:%s", what, scope)
	case resp.StatusCode == http.StatusForbidden:
		return exit(exitUnauthorized, "%s", what)
	case resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode >= 500:
		after, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		return &retryLater{time.Duration(min(max(after, 0), 3600)) * time.Second, what}
	}
	return exit(exitFailure, "%s", what)
}

// event handles one event of the stream.
func (t *tail) event(ev sse.Event) error {
	switch ev.Type {
	case "heartbeat":
		t.beat(ev.Data)
		return nil
	case "gateway/reset":
		return t.reset(ev.Data)
	}
	if err := t.print(ev); err != nil {
		return exit(exitFailure, "write: %w", err)
	}
	t.last, t.all = cmp.Or(ev.LastEventID, t.last), false
	if t.printed++; t.printed == t.count {
		return errEnough
	}
	return nil
}

// beat learns how long silence may last: three heartbeats and a little. Their own times
// count: several may be read at once.
func (t *tail) beat(data []byte) {
	var b struct {
		TS int64 `json:"ts"`
	}
	if json.Unmarshal(data, &b) != nil || b.TS <= 0 {
		return
	}
	if gap := b.TS - t.beatMS; t.beatMS > 0 && gap > 0 && gap <= time.Hour.Milliseconds() {
		t.quiet = 3*time.Duration(gap)*time.Millisecond + 5*time.Second
	}
	t.beatMS = b.TS
}

// reset tells what is missing. What the gateway dropped because this reader was slow, it
// may still have: the stream is then opened again after the last event.
func (t *tail) reset(data []byte) error {
	var r struct {
		Requested json.Number `json:"requested"`
		Oldest    uint64      `json:"oldest"`
		Dropped   uint64      `json:"dropped"`
	}
	if json.Unmarshal(data, &r) != nil {
		return nil // of a newer gateway
	}
	if r.Dropped > 0 && t.last != "" {
		fmt.Fprintf(t.say, "agentctl: this reader was too slow for %d events; asking for them again\n", r.Dropped)
		return errGap
	}
	if !t.all {
		fmt.Fprintf(t.say, "agentctl: the gateway no longer has what came after %s; events may be missing here, the next is %d or later\n",
			cmp.Or(r.Requested.String(), "that id"), r.Oldest)
	}
	if r.Oldest > 0 { // all that came before is gone; do not ask for it again
		t.last = strconv.FormatUint(r.Oldest-1, 10)
	}
	return nil
}

// tailEvent is what is printed of an event off a terminal.
type tailEvent struct {
	ID        json.RawMessage `json:"id"`
	Topic     string          `json:"topic"`
	Data      json.RawMessage `json:"data"`
	Signature json.RawMessage `json:"signature,omitempty"`
}

func (t *tail) print(ev sse.Event) error {
	data, signature, _ := bytes.Cut(ev.Data, []byte{'\n'}) // the second line signs the first
	if t.human {
		_, err := fmt.Fprintf(t.out, "%s  %s  %s  %s\n", time.Now().Format(time.TimeOnly), term.SafeLine(ev.LastEventID), term.SafeLine(ev.Type), term.SafeLine(string(data)))
		return err
	}
	e := tailEvent{ID: rawJSON([]byte(ev.LastEventID)), Topic: ev.Type, Data: rawJSON(data)}
	if len(signature) > 0 {
		e.Signature = rawJSON(signature)
	}
	enc := json.NewEncoder(t.out)
	enc.SetEscapeHTML(false)
	return enc.Encode(e)
}

// rawJSON is b, or b as a string when it is no JSON.
func rawJSON(b []byte) json.RawMessage {
	if json.Valid(b) {
		return b
	}
	s, _ := json.Marshal(string(b)) // a string always encodes
	return s
}
