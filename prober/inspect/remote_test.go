package inspect

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/unixrpc/unixrpctest"
)

// startProcessHelper serves each connection to a socket with this machine's processes.
func startProcessHelper(t *testing.T) (socket string) {
	t.Helper()
	m := New(Options{Now: func() (int64, bool) { return time.Now().UnixMilli(), true }})
	if m == nil {
		t.Skip("no reader of processes on this system")
	}
	return unixrpctest.Listen(t, func(conn net.Conn) { _ = ServeProcesses(t.Context(), conn, m) })
}

func TestAskProcesses(t *testing.T) {
	socket := startProcessHelper(t)
	name := filepath.Base(os.Args[0])[:7]
	p := AskProcesses(t.Context(), socket, ProcessQuery{SortBy: "memory", Limit: 1000, Window: 10 * time.Millisecond, Name: name, Args: true})
	found := false
	for _, q := range p.Processes {
		found = found || q.PID == os.Getpid() && q.MemBytes > 0 && strings.Contains(q.Args, name)
	}
	if !found || p.Total == 0 || p.Matching != len(p.Processes) || p.Unfinished != nil {
		t.Errorf("%+v", p)
	}
	for what, q := range map[string]ProcessQuery{
		"another order": {SortBy: "name", Limit: 1}, "no limit": {SortBy: "cpu"}, "a limit too high": {SortBy: "cpu", Limit: maxRemoteLimit + 1},
		"a long window": {SortBy: "cpu", Limit: 1, Window: time.Hour}, "a long name": {SortBy: "cpu", Limit: 1, Name: strings.Repeat("x", 2000)},
	} {
		if p := AskProcesses(t.Context(), socket, q); len(p.Unfinished) != 1 || len(p.Processes) != 0 || p.Processes == nil {
			t.Errorf("%s: %+v", what, p)
		}
	}
}

// TestProcessHelperFails checks requests that are none, and a helper that is silent or not there.
func TestProcessHelperFails(t *testing.T) {
	socket := startProcessHelper(t)
	for _, request := range []string{"nonsense\n", "{}\n", `{"sort_by":"cpu","limit":1,"timeout_ms":100,"pid":1}` + "\n", "{" + strings.Repeat(" ", 2*maxRequest) + `"sort_by":"cpu","limit":1,"timeout_ms":100}` + "\n"} {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte(request))
		if n, _ := conn.Read(make([]byte, 100)); n != 0 {
			t.Errorf("%.40q is answered", request)
		}
		_ = conn.Close()
	}
	silent := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", silent)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for _, s := range []string{silent, silent + "-gone"} {
		if p := AskProcesses(ctx, s, ProcessQuery{SortBy: "cpu", Limit: 1}); len(p.Unfinished) != 1 || p.Processes == nil {
			t.Errorf("%+v", p)
		}
	}
}
