package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/unixrpc"
	"agentctl/unixrpc/unixrpctest"
)

// startHelper serves one connection after the other on a socket, as systemd does.
func startHelper(t *testing.T, scenario string) (socket, program string) {
	t.Helper()
	program = journalctl(t, scenario)
	return unixrpctest.Listen(t, func(conn net.Conn) { _ = Serve(t.Context(), conn, program) }), program
}

// ask returns the page of a request, which has to fit the schema.
func ask(t *testing.T, socket string, r Request) *Page {
	t.Helper()
	if r.Limit == 0 {
		r.Limit = MaxLines
	}
	if r.TimeoutMS == 0 {
		r.TimeoutMS = MaxTime.Milliseconds()
	}
	raw, err := Query(t.Context(), socket, &r)
	if err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	if err := manifest.Validate("mcp://schemas/system.journal.query.output@1.0.0", raw); err != nil {
		t.Errorf("%.300s: %v", raw, err)
	}
	p := new(Page)
	if err := json.Unmarshal(raw, p); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPages(t *testing.T) {
	socket, _ := startHelper(t, "ten")
	p := ask(t, socket, Request{})
	if len(p.Lines) != 10 || p.NextCursor != "" || p.Unfinished != nil || p.Redacted != 10 {
		t.Errorf("all: %+v", p)
	}
	want := Line{TSMS: 1893456000000, Unit: "app.service", Source: "app", PID: 100, Priority: "err", Message: "line 0 password=[redacted]"}
	if p.Lines[0] != want {
		t.Errorf("got %+v, want %+v", p.Lines[0], want)
	}
	var seen []string
	for cursor, pages := "", 0; pages == 0 || cursor != ""; pages++ {
		p := ask(t, socket, Request{Limit: 3, Cursor: cursor})
		for _, l := range p.Lines {
			seen = append(seen, strings.Fields(l.Message)[1])
		}
		if cursor = p.NextCursor; pages > 4 {
			t.Fatal("the pages do not end")
		}
	}
	if strings.Join(seen, "") != "0123456789" {
		t.Errorf("the pages have %q", seen)
	}
	if p := ask(t, socket, Request{Text: "LINE 7"}); len(p.Lines) != 1 || p.Lines[0].PID != 107 || p.NextCursor != "" {
		t.Errorf("by text: %+v", p)
	}
	// A search must not find out what was redacted.
	if p := ask(t, socket, Request{Text: "hunter7"}); len(p.Lines) != 0 || p.Redacted != 0 {
		t.Errorf("by a secret: %+v", p)
	}
	if p := ask(t, socket, Request{Text: "[redacted]"}); len(p.Lines) != 10 {
		t.Errorf("by the mask: %+v", p)
	}
	empty, _ := startHelper(t, "none")
	if p := ask(t, empty, Request{}); len(p.Lines) != 0 || p.NextCursor != "" {
		t.Errorf("no entries: %+v", p)
	}
}

func TestArguments(t *testing.T) {
	socket, _ := startHelper(t, "arguments")
	p := ask(t, socket, Request{Unit: `-x\x2d.service`, Priority: "warning", FromMS: 1893456000001, ToMS: 1893456060000, Text: "=", Cursor: testCursor(3)})
	var got []string
	for _, l := range p.Lines {
		got = append(got, l.Message)
	}
	for _, want := range []string{`--unit=-x\x2d.service`, "--priority=warning", "--since=@1893456000.001000", "--until=@1893456059.999999", "--after-cursor=" + testCursor(3), "--output=json", "LC_ALL=C", "PATH="} {
		if !slices.Contains(got, want) {
			t.Errorf("no argument %s in %q", want, got)
		}
	}
	if n := len(got); n != 10 {
		t.Errorf("%d arguments and variables with = in %q", n, got)
	}
}

// TestHostile checks that whatever journalctl does, the answer is bounded and right as far as it goes.
func TestHostile(t *testing.T) {
	tests := []struct {
		scenario string
		request  Request
		lines    []string // begin of the messages
		cut      bool     // of the first line
		more     bool
		timeUp   bool
	}{
		{"endless", Request{Limit: 2}, []string{"the same", "the same"}, false, true, false},
		{"endless", Request{Text: "nowhere", TimeoutMS: 300}, nil, false, true, true},
		{"hanging", Request{TimeoutMS: 300}, []string{"one line"}, false, true, true},
		{"hugeline", Request{}, []string{"begin xxx", "xxxx", "after it"}, true, false, false},
		{"binary", Request{}, []string{"hi\uFFFD\x00!", "first\nsecond", "hi\ntext", "", "tab\t\x00 \u202e end"}, false, false, false},
		{"garbage", Request{}, []string{"fine", "cut of"}, false, false, false},
		{"crash", Request{}, []string{"one line"}, false, false, false},
	}
	for _, tt := range tests {
		t.Run(tt.scenario, func(t *testing.T) {
			socket, program := startHelper(t, tt.scenario)
			r := tt.request
			start := time.Now()
			p := ask(t, socket, r)
			// On a busy machine the program may not have written anything by then.
			for tt.timeUp && p.NextCursor == "" && 2*r.TimeoutMS <= MaxTime.Milliseconds() {
				r.TimeoutMS *= 2
				start = time.Now()
				p = ask(t, socket, r)
			}
			if took := time.Since(start); tt.timeUp && took > time.Duration(r.TimeoutMS)*time.Millisecond+3*time.Second {
				t.Errorf("took %v", took)
			}
			ok := len(p.Lines) == len(tt.lines) && (p.NextCursor != "") == tt.more && (p.Unfinished != nil) == tt.timeUp
			for i := range tt.lines {
				ok = ok && strings.HasPrefix(p.Lines[i].Message, tt.lines[i])
			}
			if !ok || (len(p.Lines) > 0 && p.Lines[0].Cut != tt.cut) {
				t.Errorf("got %d lines, cursor %q, %v", len(p.Lines), p.NextCursor, p.Unfinished)
			}
			if tt.scenario == "hanging" {
				wantGone(t, filepath.Join(filepath.Dir(program), "child"))
			}
		})
	}
}

// TestPageIsBounded checks that lines which become six times as long as JSON fill pages, not more.
func TestPageIsBounded(t *testing.T) {
	socket, _ := startHelper(t, "escapes")
	r := Request{Limit: 200, TimeoutMS: 5000}
	raw, err := Query(t.Context(), socket, &r)
	if err != nil || len(raw) > MaxPage+1024 || len(raw) < MaxPage/2 {
		t.Fatalf("%d bytes, %v", len(raw), err)
	}
	if p := ask(t, socket, r); p.NextCursor == "" || !p.Lines[0].Cut {
		t.Errorf("%d lines, cursor %q", len(p.Lines), p.NextCursor)
	}
}

// wantGone checks that the process whose pid is in a file has ended.
func wantGone(t *testing.T, file string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(string(b))
	if err != nil {
		t.Fatal(err)
	}
	for range 500 { // a killed orphan stays until its new parent has waited for it
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil || bytes.Contains(stat, []byte(") Z ")) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	t.Errorf("process %d is still there", pid)
}

// TestDisconnect checks that journalctl ends when nobody waits for the answer.
func TestDisconnect(t *testing.T) {
	program := journalctl(t, "hanging")
	daemon, helper := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- Serve(t.Context(), helper, program) }()
	if err := unixrpc.Encode(daemon, Request{Limit: 1, TimeoutMS: MaxTime.Milliseconds()}); err != nil {
		t.Fatal(err)
	}
	child := filepath.Join(filepath.Dir(program), "child")
	for range 500 {
		if b, err := os.ReadFile(child); err == nil && len(b) > 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	_ = daemon.Close()
	start := time.Now()
	if <-done; time.Since(start) > MaxTime-time.Second {
		t.Errorf("it took %v to end", time.Since(start))
	}
	wantGone(t, child)
}

func TestRefusals(t *testing.T) {
	tests := []struct {
		name, scenario, request, code string
	}{
		{"no JSON", "ten", `nonsense`, CodeRequest},
		{"an unknown field", "ten", `{"limit":1,"timeout_ms":100,"file":"/etc/shadow"}`, CodeRequest},
		{"the same field again", "ten", `{"limit":1,"limit":1,"timeout_ms":100}`, CodeRequest},
		{"two lines", "ten", `{"limit":1,"timeout_ms":100}` + "\n{}", CodeRequest},
		{"too long", "ten", `{"limit":1,"timeout_ms":100,"text":"` + strings.Repeat("x", maxRequest) + `"}`, CodeRequest},
		{"a unit with a space", "ten", `{"limit":1,"timeout_ms":100,"unit":"a --file=/x"}`, CodeRequest},
		{"a unit with a pattern", "ten", `{"limit":1,"timeout_ms":100,"unit":"*"}`, CodeRequest},
		{"no such priority", "ten", `{"limit":1,"timeout_ms":100,"priority":"7"}`, CodeRequest},
		{"a time before 1970", "ten", `{"limit":1,"timeout_ms":100,"from_ms":-1}`, CodeRequest},
		{"a limit too high", "ten", `{"limit":201,"timeout_ms":100}`, CodeRequest},
		{"no limit", "ten", `{"timeout_ms":100}`, CodeRequest},
		{"no time", "ten", `{"limit":1}`, CodeRequest},
		{"too much time", "ten", `{"limit":1,"timeout_ms":60000}`, CodeRequest},
		{"a cursor of another form", "ten", `{"limit":1,"timeout_ms":100,"cursor":"s=1 --file=/x"}`, CodeCursor},
		{"a cursor that is not there", "nocursor", `{"limit":1,"timeout_ms":5000,"cursor":"` + testCursor(1) + `"}`, CodeCursor},
		{"journalctl may not read", "forbidden", `{"limit":1,"timeout_ms":5000}`, CodeFailed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			socket, _ := startHelper(t, tt.scenario)
			conn, err := net.Dial("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			_, _ = conn.Write([]byte(tt.request + "\n"))
			reply := make([]byte, maxAnswer)
			n, _ := conn.Read(reply)
			var e *Error
			if page, err := parseAnswer(reply[:n]); !errors.As(err, &e) || e.Code != tt.code {
				t.Errorf("got %s, %v, want %s", page, err, tt.code)
			}
		})
	}
	var e *Error
	gone, program := startHelper(t, "ten")
	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	if _, err := Query(t.Context(), gone, &Request{Limit: 1, TimeoutMS: MaxTime.Milliseconds()}); !errors.As(err, &e) || e.Code != CodeFailed {
		t.Errorf("without journalctl: %v", err)
	}
}

// TestQueryFails checks the daemon's side without a helper, and with one that is silent.
func TestQueryFails(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	if _, err := Query(t.Context(), socket, &Request{}); !errors.Is(err, unixrpc.ErrNoHelper) {
		t.Errorf("no socket: %v", err)
	}
	silent, err := net.Listen("unix", socket+"-silent")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Query(ctx, socket+"-silent", &Request{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a helper that is silent: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	answers := []struct {
		text string
		want func(error) bool
	}{
		{"", func(err error) bool { return errors.Is(err, unixrpc.ErrNoAnswer) }},
		{"nonsense", func(err error) bool { return err != nil }},
		{strings.Repeat(" ", maxAnswer) + "{}", func(err error) bool { return err != nil }},
	}
	for _, a := range answers {
		go func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, maxRequest))
			_, _ = conn.Write([]byte(a.text))
			_ = conn.Close()
		}()
		if page, err := Query(t.Context(), socket, &Request{}); !a.want(err) {
			t.Errorf("answer %.20q: %s, %v", a.text, page, err)
		}
	}
}
