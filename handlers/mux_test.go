package handlers_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/transport/link"
)

const node = "01hzx9k3m4p7q8r9s0t1v2w3xy"

var _ link.Handler = (*handlers.Mux)(nil)

// fake is a handler by hand.
type fake struct {
	capability manifest.Capability
	calls      atomic.Int64
	call       func(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, handlers.Stream, error)
}

func (f *fake) Capability() manifest.Capability { return f.capability }

func (f *fake) Call(ctx context.Context, tool manifest.ToolName, args []byte) ([]byte, handlers.Stream, error) {
	f.calls.Add(1)
	if f.call == nil {
		return []byte("{}"), nil, nil
	}
	return f.call(ctx, tool, args)
}

// fataler is what testing.T and rapid.T have in common.
type fataler interface {
	Helper()
	Fatal(args ...any)
}

func mux(t fataler, o handlers.Options, hs ...handlers.Handler) *handlers.Mux {
	t.Helper()
	m, err := handlers.New(o, hs...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func tool(t testing.TB, name string) manifest.ToolName {
	t.Helper()
	n, ok := manifest.ParseToolName(strings.Replace(name, "NODE", node, 1))
	if !ok {
		t.Fatalf("%s is no tool name", name)
	}
	return n
}

func wantCode(t testing.TB, what string, err error, code manifest.Code) {
	t.Helper()
	var e *manifest.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("%s: got %v, want %s", what, err, code)
	}
}

// TestSetEnabled checks that a disabled capability is neither announced nor answered.
func TestSetEnabled(t *testing.T) {
	m := mux(t, handlers.Options{}, handlers.NewEcho(func() (int64, bool) { return 1893456000000, true }), &fake{capability: manifest.Metrics()})
	echo := tool(t, "sysecho.NODE.echo.invoke")
	call := func() error {
		_, _, err := m.Call(t.Context(), echo, []byte(`{"message":"hi"}`))
		return err
	}
	if err := call(); err != nil {
		t.Fatal(err)
	}
	withoutEcho := func(capID string) bool { return capID != "echo" }
	if !m.SetEnabled(withoutEcho) || m.SetEnabled(withoutEcho) {
		t.Error("the first call changes something, the second does not")
	}
	if caps := m.Capabilities(); len(caps) != 1 || caps[0].CapID != "metrics" {
		t.Errorf("announced: %v", caps)
	}
	wantCode(t, "a disabled tool", call(), manifest.ManifestInvalid)
	if !m.SetEnabled(func(string) bool { return true }) || len(m.Capabilities()) != 2 || call() != nil {
		t.Errorf("enabled again: %v, %v", m.Capabilities(), call())
	}
}

// The announce holds exactly what is registered, as RFC-0005 §9 has it.
func TestAnnouncesWhatItAnswers(t *testing.T) {
	echo := handlers.NewEcho(nil)
	if got := mux(t, handlers.Options{}).Capabilities(); len(got) != 0 {
		t.Errorf("an empty Mux announces %v", got)
	}
	m := mux(t, handlers.Options{}, echo, handlers.NewMetrics(nil, nil))
	raw, err := json.Marshal(m.Capabilities())
	if err != nil {
		t.Fatal(err)
	}
	const want = `[{"cap_id":"echo","kind":"system.echo","schema_ref":"mcp://schemas/system.echo.invoke.input@1.0.0","verbs":["invoke"],"safety_class":"read_only","constraints":{"rate_limit_rps":10,"max_concurrency":4,"deadline_ms_default":2000}},` +
		`{"cap_id":"metrics","kind":"system.metrics","schema_ref":"mcp://schemas/system.metrics.snapshot.input@1.0.0","verbs":["snapshot","subscribe"],"safety_class":"read_only","constraints":{"rate_limit_rps":10,"max_concurrency":4,"deadline_ms_default":2000}}]`
	if string(raw) != want {
		t.Errorf("got %s\nwant %s", raw, want)
	}
	announce := fmt.Sprintf(`{"manifest_version":1,"manifest_sha256":%q,"capabilities":%s}`, manifest.Hash(raw), raw)
	if err := manifest.Validate(manifest.AnnounceRef, []byte(announce)); err != nil {
		t.Error(err)
	}
}

func TestNewRefuses(t *testing.T) {
	bad := manifest.Echo()
	bad.SafetyClass = manifest.Mutating
	many := make([]handlers.Handler, manifest.MaxCapabilities+1)
	for i := range many {
		c := manifest.Echo()
		c.CapID = fmt.Sprintf("echo%d", i)
		many[i] = &fake{capability: c}
	}
	tests := []struct {
		name string
		hs   []handlers.Handler
	}{
		{"a capability of no release", []handlers.Handler{&fake{capability: bad}}},
		{"a cap_id twice", []handlers.Handler{handlers.NewEcho(nil), &fake{capability: manifest.Echo()}}},
		{"33 capabilities", many},
	}
	for _, tt := range tests {
		if m, err := handlers.New(handlers.Options{}, tt.hs...); err == nil || m != nil {
			t.Errorf("%s: no error", tt.name)
		}
	}
	if _, err := handlers.New(handlers.Options{}, many[1:]...); err != nil {
		t.Errorf("32 capabilities: %v", err)
	}
}

func TestRefusalsDoNotReachTheHandler(t *testing.T) {
	snapshotOnly := manifest.Metrics()
	snapshotOnly.Verbs = snapshotOnly.Verbs[:1]
	h := &fake{capability: snapshotOnly}
	e := &fake{capability: manifest.Echo()}
	m := mux(t, handlers.Options{}, h, e)
	long := `{"message":"` + strings.Repeat("x", 1025) + `"}`
	tests := []struct{ name, args string }{
		{"sysecho.NODE.other.invoke", `{"message":"x"}`},
		{"sys.NODE.echo.invoke", `{"message":"x"}`},
		{"sysecho.NODE.echo.snapshot", `{"message":"x"}`},
		{"sys.NODE.metrics.subscribe", `{}`}, // a verb of the kind that was not announced
		{"sys.NODE.metrics.invoke", `{}`},
		{"sysecho.NODE.echo.invoke", `{}`},
		{"sysecho.NODE.echo.invoke", `{"message":"x","y":1}`},
		{"sysecho.NODE.echo.invoke", `{"message":"é"}`},
		{"sysecho.NODE.echo.invoke", long},
		{"sysecho.NODE.echo.invoke", `{"message":"a","message":"b"}`},
		{"sysecho.NODE.echo.invoke", `{"message":`},
		{"sysecho.NODE.echo.invoke", ``},
		{"sysecho.NODE.echo.invoke", `null`},
		{"sys.NODE.metrics.snapshot", `{"interval_ms":5000}`},
	}
	for _, tt := range tests {
		result, stream, err := m.Call(t.Context(), tool(t, tt.name), []byte(tt.args))
		wantCode(t, tt.name+" "+tt.args, err, manifest.ManifestInvalid)
		if result != nil || stream != nil {
			t.Errorf("%s %s: got %s", tt.name, tt.args, result)
		}
	}
	if n := h.calls.Load() + e.calls.Load(); n != 0 {
		t.Errorf("the handlers ran %d times", n)
	}
	// None of it cost a start: the full rate is left.
	for i := range 10 {
		if _, _, err := m.Call(t.Context(), tool(t, "sysecho.NODE.echo.invoke"), []byte(`{"message":"x"}`)); err != nil {
			t.Errorf("call %d: %v", i+1, err)
		}
	}
}

func TestRateAndConcurrency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		h := &fake{capability: manifest.Echo()}
		h.call = func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
			<-release
			return []byte("{}"), nil, nil
		}
		m := mux(t, handlers.Options{}, h)
		name := tool(t, "sysecho.NODE.echo.invoke")
		call := func() error {
			_, _, err := m.Call(context.Background(), name, []byte(`{"message":"x"}`))
			return err
		}
		results := make(chan error, 4)
		for range 4 {
			go func() { results <- call() }()
		}
		synctest.Wait()
		wantCode(t, "the fifth call at once", call(), manifest.RateLimited)
		close(release)
		for range 4 {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		for range 6 {
			if err := call(); err != nil {
				t.Error(err)
			}
		}
		err := call()
		wantCode(t, "the eleventh call", err, manifest.RateLimited)
		if e := manifest.AsError(err); e.RetryAfterMS != 900 {
			t.Errorf("retry after %d ms, want the device's window of 900", e.RetryAfterMS)
		}
		time.Sleep(manifest.DeviceWindow)
		if err := call(); err != nil {
			t.Errorf("after the window: %v", err)
		}
		if n := h.calls.Load(); n != 11 {
			t.Errorf("the handler ran %d times, want 11", n)
		}
	})
}

func TestHandlerFailures(t *testing.T) {
	stream := func(context.Context, func([]byte) error) error { return nil }
	tests := []struct {
		name string
		call func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error)
		code manifest.Code
	}{
		{"panics", func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
			panic("canary9876")
		}, manifest.Internal},
		{"panics with nil", func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
			panic(nil)
		}, manifest.Internal},
		{"a foreign error", func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
			return nil, nil, errors.New("canary9876: open /dev/thing")
		}, manifest.Internal},
		{"an error of ours", func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
			return nil, nil, fmt.Errorf("wrapped: %w", manifest.E(manifest.SafetyDenied, "no"))
		}, manifest.SafetyDenied},
		{"the handler's own deadline", func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
			return nil, nil, fmt.Errorf("read: %w", context.DeadlineExceeded)
		}, manifest.DeadlineExceeded},
		{"nothing", func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
			return nil, nil, nil
		}, manifest.Internal},
		{"a stream where none belongs", func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
			return []byte("{}"), stream, nil
		}, manifest.Internal},
	}
	for _, tt := range tests {
		var where []string
		h := &fake{capability: manifest.Echo(), call: tt.call}
		m := mux(t, handlers.Options{OnPanic: func(capID string, stack []byte) {
			where = append(where, capID+" "+string(stack))
		}}, h)
		result, s, err := m.Call(t.Context(), tool(t, "sysecho.NODE.echo.invoke"), []byte(`{"message":"x"}`))
		wantCode(t, tt.name, err, tt.code)
		if result != nil || s != nil {
			t.Errorf("%s: got %s", tt.name, result)
		}
		if err != nil && strings.Contains(err.Error(), "canary9876") {
			t.Errorf("%s: the message says %v", tt.name, err)
		}
		panicked := strings.HasPrefix(tt.name, "panics")
		if panicked != (len(where) == 1) {
			t.Errorf("%s: OnPanic was called %d times", tt.name, len(where))
		}
		if panicked && (!strings.HasPrefix(where[0], "echo ") || !strings.Contains(where[0], "mux_test.go") || strings.Contains(where[0], "canary9876")) {
			t.Errorf("%s: OnPanic got %s", tt.name, where[0])
		}
		// The place in flight is free again.
		for range 6 {
			_, _, err := m.Call(t.Context(), tool(t, "sysecho.NODE.echo.invoke"), []byte(`{"message":"x"}`))
			wantCode(t, tt.name+" again", err, tt.code)
		}
	}
}

func TestStreamPanics(t *testing.T) {
	panics := 0
	h := &fake{capability: manifest.Metrics()}
	h.call = func(context.Context, manifest.ToolName, []byte) ([]byte, handlers.Stream, error) {
		return []byte(`{"interval_ms":5000}`), func(context.Context, func([]byte) error) error { panic("in the stream") }, nil
	}
	m := mux(t, handlers.Options{OnPanic: func(string, []byte) { panics++ }}, h)
	_, stream, err := m.Call(t.Context(), tool(t, "sys.NODE.metrics.subscribe"), []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, "the stream", stream(t.Context(), func([]byte) error { return nil }), manifest.Internal)
	if panics != 1 {
		t.Errorf("OnPanic was called %d times", panics)
	}
	// A stream is wanted where the verb is one.
	h.call = nil
	_, _, err = m.Call(t.Context(), tool(t, "sys.NODE.metrics.subscribe"), []byte("{}"))
	wantCode(t, "no stream", err, manifest.Internal)
}

// A slow handler that honours ctx ends with the budget of RFC-0005 §7.
func TestSlowHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &fake{capability: manifest.Echo()}
		h.call = func(ctx context.Context, _ manifest.ToolName, _ []byte) ([]byte, handlers.Stream, error) {
			select {
			case <-time.After(time.Minute):
				return []byte("{}"), nil, nil
			case <-ctx.Done():
				return nil, nil, context.Cause(ctx)
			}
		}
		m := mux(t, handlers.Options{}, h)
		ctx, cancel := context.WithTimeout(context.Background(), manifest.DefaultConstraints.Deadline())
		defer cancel()
		start := time.Now()
		_, _, err := m.Call(ctx, tool(t, "sysecho.NODE.echo.invoke"), []byte(`{"message":"x"}`))
		wantCode(t, "slow handler", err, manifest.DeadlineExceeded)
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("took %v, want 2 s", took)
		}
	})
}

// The handler gets arguments in their normal form and the tool's name in parts.
func TestHandlerGetsNormalForm(t *testing.T) {
	h := &fake{capability: manifest.Metrics()}
	var got []string
	h.call = func(_ context.Context, tool manifest.ToolName, args []byte) ([]byte, handlers.Stream, error) {
		got = append(got, tool.Verb+" "+tool.NodeID+" "+string(args))
		return []byte(`{"interval_ms":5000}`), func(context.Context, func([]byte) error) error { return nil }, nil
	}
	m := mux(t, handlers.Options{}, h)
	for _, args := range []string{`{ "interval_ms": 5e3 }`, `{}`} {
		if _, _, err := m.Call(t.Context(), tool(t, "sys.NODE.metrics.subscribe"), []byte(args)); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"subscribe " + node + ` {"interval_ms":5000}`, "subscribe " + node + " {}"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
