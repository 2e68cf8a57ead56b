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

func TestPage(t *testing.T) {
	socket, _ := startHelper(t, "ten")
	p := ask(t, socket, Request{})
	if len(p.Lines) != 10 || p.NextCursor != "" || p.Unfinished != nil || p.Redacted != 10 {
		t.Fatalf("got %+v, want all ten entries, each with one secret", p)
	}
	want := Line{TSMS: 1893456000000, Unit: "app.service", Source: "app", PID: 100, Priority: "err", Message: "line 0 password=[redacted]"}
	if p.Lines[0] != want {
		t.Errorf("the first line is %+v, want %+v", p.Lines[0], want)
	}
}

// Pages of three lines have each of the ten entries once, newest first.
func TestNextCursor(t *testing.T) {
	socket, _ := startHelper(t, "ten")
	var pages []string
	for cursor := ""; len(pages) == 0 || cursor != "" && len(pages) < 10; {
		p := ask(t, socket, Request{Limit: 3, Cursor: cursor})
		numbers := ""
		for _, l := range p.Lines {
			numbers += strings.Fields(l.Message)[1]
		}
		pages = append(pages, numbers)
		cursor = p.NextCursor
	}
	if want := []string{"012", "345", "678", "9"}; !slices.Equal(pages, want) {
		t.Errorf("the pages have entries %q, want %q", pages, want)
	}
}

// A search compares redacted messages, so that it does not find secrets.
func TestSearch(t *testing.T) {
	socket, _ := startHelper(t, "ten")
	for text, want := range map[string]int{"LINE 7": 1, "hunter7": 0, "redact": 10, "[redacted]": 10, "=[redact": 10} {
		p := ask(t, socket, Request{Text: text})
		if len(p.Lines) != want || p.Redacted != want || p.NextCursor != "" {
			t.Errorf("%q is found in %+v, want %d lines", text, p, want)
		}
	}
}

func TestEmptyJournal(t *testing.T) {
	socket, _ := startHelper(t, "none")
	if p := ask(t, socket, Request{}); len(p.Lines) != 0 || p.NextCursor != "" {
		t.Errorf("got %+v, want no line", p)
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
		{"endless", Request{Text: "nowhere", TimeoutMS: 100}, nil, false, true, true},
		{"hanging", Request{TimeoutMS: 100}, []string{"one line"}, false, true, true},
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
}

func TestWithoutJournalctl(t *testing.T) {
	socket, program := startHelper(t, "ten")
	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	var e *Error
	if _, err := Query(t.Context(), socket, &Request{Limit: 1, TimeoutMS: MaxTime.Milliseconds()}); !errors.As(err, &e) || e.Code != CodeFailed {
		t.Errorf("got %v, want an Error with code %s", err, CodeFailed)
	}
}

func TestQueryWithoutHelper(t *testing.T) {
	if _, err := Query(t.Context(), filepath.Join(t.TempDir(), "s"), &Request{}); !errors.Is(err, unixrpc.ErrNoHelper) {
		t.Errorf("got %v, want %v", err, unixrpc.ErrNoHelper)
	}
}

// A helper that accepts the connection and never answers costs the caller its deadline.
func TestQueryOfSilentHelper(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	silent, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Query(ctx, socket, &Request{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
	}
}

func TestQueryOfBadAnswer(t *testing.T) {
	tests := []struct {
		name, answer string
		want         error // nil: any
	}{
		{"nothing", "", unixrpc.ErrNoAnswer},
		{"not JSON", "nonsense", nil},
		{"too long", strings.Repeat(" ", maxAnswer) + "{}", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			socket := unixrpctest.Listen(t, func(conn net.Conn) {
				_, _ = conn.Read(make([]byte, maxRequest))
				_, _ = conn.Write([]byte(tt.answer))
				_ = conn.Close()
			})
			if page, err := Query(t.Context(), socket, &Request{}); err == nil || tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("got %s, %v, want an error like %v", page, err, tt.want)
			}
		})
	}
}
