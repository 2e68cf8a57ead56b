package test

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// auditLines reads the audit log of a relay past its disk's faults. It fails for a line that is cut.
func (d *diskRelay) auditLines() (list []map[string]string) {
	d.t.Helper()
	names, err := filepath.Glob(filepath.Join(d.disk.Backing, "state", "audit.jsonl*"))
	if err != nil {
		d.t.Fatal(err)
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			d.t.Fatal(err)
		}
		for line := range bytes.Lines(b) {
			var m map[string]string
			if err := json.Unmarshal(line, &m); err != nil {
				d.t.Fatalf("%s: %.200q: %v", filepath.Base(name), line, err)
			}
			list = append(list, m)
		}
	}
	return list
}

// While audit.jsonl hangs, fails or cannot be renamed, calls are served and only administrative
// changes are refused; no line is lost or cut, and a change that was answered is on the disk.
func TestDiskAuditReal(t *testing.T) {
	skipUnlessSlow(t)
	d := newDiskRelay(t)
	create := func() diskAnswer { return d.request("POST", d.url+"/v1/tokens", `{"subject":"x"}`) }
	calls := 0
	call := func(n int) {
		t.Helper()
		for range n {
			calls++
			if a := d.tool("agents.list", "{}"); a.status != 200 {
				t.Fatalf("a call: %d after %s: %s", a.status, a.took, a.body)
			}
		}
	}
	if a := create(); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if last := d.auditLines(); last[len(last)-1]["tool"] != "tokens.create" || last[len(last)-1]["decision"] != "allow" || last[len(last)-2]["decision"] != "begin" {
		t.Errorf("what was answered is not on the disk: %v", last)
	}
	for _, fault := range []string{"hang write audit.jsonl", "hang fsync audit.jsonl", "fail write audit.jsonl ENOSPC", "fail fsync audit.jsonl EIO", "full 0"} {
		call(20)
		d.disk.Fault(strings.Fields(fault)...)
		call(20)
		if a := create(); a.status != 500 || a.Error.Reason != "storage" || a.took > patience/4 { // begin and the outcome, 2 s each on an idle machine
			t.Errorf("%s: a change: %d after %s: %s", fault, a.status, a.took, a.body)
		}
		d.await(fault+" in readyz", func() bool { call(1); a := d.ready(); return a.status == 503 && strings.Contains(a.body, "audit") })
		if a := d.request("GET", d.metrics, ""); a.status != 200 {
			t.Errorf("%s: metrics: %d after %s", fault, a.status, a.took)
		}
		d.disk.Clear()
		d.await("the end of: "+fault, func() bool { call(1); return d.ready().status == 200 })
		if a := create(); a.status != 200 {
			t.Errorf("after %s: %d %s", fault, a.status, a.body)
		}
	}
	written := func() (n int) {
		for _, m := range d.auditLines() {
			if m["tool"] == "agents.list" && m["decision"] == "allow" {
				n++
			}
		}
		return n
	}
	d.await("every call in the audit log", func() bool { return written() == calls })
}

// A client without a token, as fast as it can, changes nothing in the audit log. Its connections end
// after 16 requests, and a request with two lengths gets 400 and the end of the connection.
func TestDiskStrangersReal(t *testing.T) {
	skipUnlessSlow(t)
	d := newDiskRelay(t)
	before := len(d.auditLines())
	// exchange sends requests on a connection and returns what it answers until it ends.
	exchange := func(requests string) string {
		t.Helper()
		c, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		_, _ = io.WriteString(c, requests)
		_ = c.SetReadDeadline(time.Now().Add(patience))
		all, err := io.ReadAll(c)
		if err != nil {
			t.Fatal(err)
		}
		return string(all)
	}
	const perConn, conns = 16, 10 // fewer refusals than begin to wait
	for range conns {
		answers := exchange(strings.Repeat("GET /v1/nodes HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", perConn))
		if n := strings.Count(answers, "HTTP/1.1 401 "); n != perConn {
			t.Fatalf("%d answers 401", n)
		}
	}
	if answers := exchange("POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"); !strings.HasPrefix(answers, "HTTP/1.1 400 ") {
		t.Errorf("two lengths: %q", answers)
	}
	d.process.stop()
	refusals, err := os.ReadFile(filepath.Join(d.disk.Backing, "state", "refusals.jsonl"))
	if err != nil || bytes.Count(refusals, []byte("\n")) != 1 || !bytes.Contains(refusals, []byte(`"address":"127.0.0.1","count":160,"reasons":{"no_token":160}`)) {
		t.Errorf("%v: %s", err, refusals)
	}
	if n := len(d.auditLines()); n != before {
		t.Errorf("%d lines in the audit log, %d before", n, before)
	}
}
