package test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	bigendian "encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/relay/auth"
)

// What a hostile request may end in.
const (
	refused = "refused" // an answer of 400 to 599, and then the server closes
	closed  = "closed"  // the server closes, with or without an answer
	closes  = "closes"  // the server sends a WebSocket close frame, and then closes
	answers = "answers" // an answer, and the connection may serve the next request
	waits   = "waits"   // the server waits for the rest, up to a timeout
)

// bomb is one kind of hostile request.
type bomb struct {
	name, end string
	send      string             // what is sent, as fast as the server takes it; a link's frames after the 101
	then      func(*net.TCPConn) // nil: read until the server closes
}

// endOfUpgrade separates the request for a link from its frames.
const endOfUpgrade = "\x00frames\x00"

// bombs are the kinds that a stranger, or the holder of a token, can send. Each is to end as it
// says, within 2 s of the server's answer, and to leave nothing behind.
func bombs(t *testing.T, token string) []bomb {
	const mb = 1 << 20
	rep := strings.Repeat
	get := func(head string) string { return "GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + head + "\r\n" }
	authorized := "Host: localhost\r\nAuthorization: Bearer " + token + "\r\nAccept: application/json, text/event-stream\r\n"
	to := func(path, head, body string) string {
		return "POST " + path + " HTTP/1.1\r\n" + authorized + "Content-Type: application/json\r\n" + head + "\r\n" + body
	}
	sized := func(path, body string) string {
		return to(path, "Connection: close\r\nContent-Length: "+strconv.Itoa(len(body))+"\r\n", body)
	}
	call := func(body string) string { return sized("/mcp/tools/call", body) }
	mcp := func(body string) string { return sized("/mcp", body) }
	chunked := func(body string) string { return to("/mcp/tools/call", "Transfer-Encoding: chunked\r\n", body) }
	var keys strings.Builder
	for i := range 70_000 {
		fmt.Fprintf(&keys, `,"k%05d":0`, i)
	}
	var gz bytes.Buffer
	z := gzip.NewWriter(&gz)
	for range 8 { // MiB of zeros in as many KiB
		_, _ = z.Write(make([]byte, mb))
	}
	_ = z.Close()
	arguments := func(v string) string { return `{"tool":"tickets.list","arguments":` + v + `}` }
	initialize := `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`
	frame := func(first byte, payload string) string { // masked with zeros
		b := []byte{first, 0x80 | byte(min(len(payload), 126))}
		if len(payload) > 65535 {
			b[1] = 0x80 | 127
			b = bigendian.BigEndian.AppendUint64(b, uint64(len(payload)))
		} else if len(payload) > 125 {
			b = bigendian.BigEndian.AppendUint16(b, uint16(len(payload)))
		}
		return string(b) + "\x00\x00\x00\x00" + payload
	}
	upgrade := func(key, version, protocol string) string {
		return "GET /v1/device/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: " + version +
			"\r\nSec-WebSocket-Key: " + key + "\r\nSec-WebSocket-Protocol: " + protocol + "\r\n\r\n"
	}
	ws := func(frames string) string {
		return upgrade("dGhlIHNhbXBsZSBub25jZQ==", "13", "agentctl.device.v2.1") + endOfUpgrade + frames
	}
	text := func(payload string) string { return ws(frame(0x81, payload)) }
	envelope := func(payload string) string {
		return text(`{"type":"auth","msg_id":"01m7wxg3khrt462w5zc25v99bb","payload":` + payload + `}`)
	}
	closeWrite := func(c *net.TCPConn) { _ = c.CloseWrite() }
	reset := func(c *net.TCPConn) { _ = c.SetLinger(0); _ = c.Close() }
	list := []bomb{
		// Heads.
		{"garbage", refused, "\x01\x02\x03\r\n\r\n", nil},
		{"binary", refused, rep("\x00\xff", 64<<10), nil},
		{"empty lines", refused, rep("\r\n", 50_000), nil},
		{"no line ends", refused, rep("A", 256<<10), nil},
		{"HTTP/0.9", refused, "GET /\r\n\r\n", nil},
		{"HTTP/2 preface", closed, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rep("\x00\x00\x00\x04\x00\x00\x00\x00\x00", 1000), nil},
		{"HTTP/9.9", refused, "GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", nil},
		{"TLS to plain", waits, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rep("\x00", 512), nil},
		{"SSH", refused, "SSH-2.0-OpenSSH_9.6\r\n\r\n", nil},
		{"long request line", refused, "GET /" + rep("a", 64<<10) + " HTTP/1.1\r\n\r\n", nil},
		{"long method", refused, rep("A", 32<<10) + " / HTTP/1.1\r\n\r\n", nil},
		{"long header", refused, get("X: " + rep("a", 256<<10) + "\r\n"), nil},
		{"many headers", refused, get(rep("X: y\r\n", 50_000)), nil},
		{"header without a colon", refused, get("XYZ\r\n"), nil},
		{"folded header", answers, get("X: y\r\n z\r\n"), nil},
		{"NUL in a header", refused, get("X: \x00\r\n"), nil},
		{"space before the colon", refused, get("X : y\r\n"), nil},
		{"two hosts", refused, get("Host: localhost\r\n"), nil},
		{"no host", refused, "GET / HTTP/1.1\r\n\r\n", nil},
		{"malformed host", refused, "GET / HTTP/1.1\r\nHost: a b\r\n\r\n", nil},
		{"rebound host", answers, "GET /healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n", nil},
		{"foreign origin", answers, get("Origin: https://evil.example\r\n"), nil},
		{"two lengths", refused, get("Content-Length: 1\r\nContent-Length: 2\r\n"), nil},
		{"negative length", refused, get("Content-Length: -1\r\n"), nil},
		{"length beyond int64", refused, get("Content-Length: 99999999999999999999\r\n"), nil},
		{"unknown transfer coding", refused, get("Transfer-Encoding: gzip\r\n"), nil},
		{"chunked twice", refused, get("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), nil},
		{"unknown expectation", refused, get("Expect: 200-ok\r\n"), nil},
		{"h2c upgrade", answers, get("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"), nil},
		{"CONNECT", answers, "CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", nil},
		{"TRACE", answers, "TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n", nil},
		{"OPTIONS *", answers, "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", nil},
		{"path traversal", answers, "GET /schemas/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", nil},
		{"NUL in the path", answers, "GET /schemas/%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", nil},
		{"bad escape", refused, "GET /%zz HTTP/1.1\r\nHost: localhost\r\n\r\n", nil},
		{"absolute URI", answers, "GET http://evil.example/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", nil},
		{"pipelined, unread", answers, rep(get(""), 2000), nil},
		{"slow head", waits, "GET /healthz HTTP/1.1\r\nHost: loc", nil},
		{"silent", waits, "", nil},
		{"one byte", waits, "G", nil},
		{"half-closed", closed, "", closeWrite},
		{"half a head, half-closed", closed, "GET /healthz HTTP/1.1\r\nHo", closeWrite},
		{"reset", closed, get(""), reset},
		// Tokens.
		{"body without a token", refused, "POST /mcp/tools/call HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + rep(" ", 1000), nil},
		{"MCP body without a token", refused, "POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + rep(" ", 1000), nil},
		{"long token", answers, "GET /v1/nodes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + rep("a", 12<<10) + "\r\n\r\n", nil},
		{"token of dots", answers, "GET /v1/nodes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + rep(".", 4<<10) + "\r\n\r\n", nil},
		{"two tokens", answers, "GET /v1/nodes HTTP/1.1\r\n" + authorized + "Authorization: Bearer x\r\n\r\n", nil},
		// Bodies.
		{"2 MiB announced", refused, to("/mcp/tools/call", "Content-Length: 2097152\r\n", ""), nil},
		{"2 MiB announced and sent", refused, to("/mcp/tools/call", "Content-Length: 2097152\r\n", rep(" ", 2*mb)), nil},
		{"1 MiB announced", waits, to("/mcp/tools/call", "Content-Length: 1048576\r\n", ""), nil},
		{"1 MiB, one byte short", waits, to("/mcp/tools/call", "Content-Length: 1048576\r\n", rep(" ", mb-1)), nil},
		{"1 MiB, half-closed", closed, to("/mcp/tools/call", "Content-Length: 1048576\r\n", rep(" ", 1000)), closeWrite},
		{"1 MiB, reset", closed, to("/mcp/tools/call", "Content-Length: 1048576\r\n", rep(" ", 1000)), reset},
		{"blanks", refused, call(rep(" ", mb)), nil},
		{"open brackets", refused, call(rep("[", mb)), nil},
		{"nested objects", refused, call(rep(`{"a":`, mb/5)), nil},
		{"nested arguments", refused, call(arguments(rep("[", 10_000) + rep("]", 10_000))), nil},
		{"many keys", refused, call(arguments(`{"a":0` + keys.String() + `}`)), nil},
		{"equal keys", refused, call(`{"tool":"a.b"` + rep(`,"tool":"a.b"`, 50_000) + `}`), nil},
		{"long string", refused, call(arguments(`{"status":"` + rep("a", mb-100) + `"}`)), nil},
		{"escapes", refused, call(arguments(`{"status":"` + rep(`\u0000`, mb/6-100) + `"}`)), nil},
		{"long number", refused, call(arguments(`{"limit":` + rep("9", mb-100) + `}`)), nil},
		{"number beyond float64", refused, call(arguments(`{"limit":1e999999}`)), nil},
		{"bad UTF-8", refused, call(arguments(`{"status":"` + rep("\xff", 1000) + `"}`)), nil},
		{"lone surrogates", refused, call(arguments(`{"status":"` + rep(`\ud800`, 1000) + `"}`)), nil},
		{"NULs", refused, call(rep("\x00", 100_000)), nil},
		{"byte order mark", refused, call("\xef\xbb\xbf" + arguments("{}")), nil},
		{"UTF-16", refused, call("\xff\xfe{\x00}\x00"), nil},
		{"two values", refused, call(arguments("{}") + arguments("{}")), nil},
		{"long tool name", refused, call(`{"tool":"` + rep("a", 100_000) + `","arguments":{}}`), nil},
		{"gzip bomb", refused, to("/mcp/tools/call", "Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: "+strconv.Itoa(gz.Len())+"\r\n", gz.String()), nil},
		{"multipart", refused, "POST /mcp/tools/call HTTP/1.1\r\n" + authorized + "Connection: close\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n\r\n" + rep("-", 1000), nil},
		{"100-continue and nothing", waits, to("/mcp/tools/call", "Expect: 100-continue\r\nContent-Length: 1000\r\n", ""), nil},
		{"pipelined calls, unread", answers, rep(to("/mcp/tools/call", "Content-Length: 35\r\n", `{"tool":"no.such","arguments":{}}  `), 200), nil},
		// Chunks.
		{"2 MiB in chunks", refused, chunked(rep("10000\r\n"+rep("a", 64<<10)+"\r\n", 32)), nil},
		{"1-byte chunks", closed, chunked(rep("1\r\na\r\n", 20_000) + "0\r\n\r\n"), closeWrite},
		{"chunk extensions", closed, chunked(rep("1;x="+rep("y", 1000)+"\r\na\r\n", 1000)), closeWrite},
		{"long chunk extension", refused, chunked("1;" + rep("x", 100_000) + "\r\na\r\n"), nil},
		{"chunk size overflow", refused, chunked("fffffffffffffffff\r\na"), nil},
		{"chunk size of -1", refused, chunked("-1\r\na"), nil},
		{"chunk without end", waits, chunked("ffff\r\na"), nil},
		{"chunk longer than it says", refused, chunked("1\r\naaaa\r\n0\r\n\r\n"), nil},
		{"trailers", closed, chunked("0\r\n" + rep("X: y\r\n", 50_000)), closeWrite},
		// MCP.
		{"initialize, malformed", refused, mcp(`{"jsonrpc":"2.0","id":1,"method":"initialize","params":[]}`), nil},
		{"batch of 1,000", refused, mcp("[" + initialize + rep(","+initialize, 1000) + "]"), nil},
		{"nested batch", refused, mcp(rep("[", 1000) + rep("]", 1000)), nil},
		{"empty batch", refused, mcp("[]"), nil},
		{"MCP blanks", refused, mcp(rep(" ", mb)), nil},
		{"MCP many keys", refused, mcp(`{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"a":0` + keys.String() + `}}`), nil},
		{"MCP deep params", refused, mcp(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a.b","arguments":` + rep(`{"a":`, 10_000) + "0" + rep("}", 10_000) + `}}`), nil},
		{"id of an object", refused, mcp(`{"jsonrpc":"2.0","id":{},"method":"tools/list"}`), nil},
		{"id of 100 KB", refused, mcp(`{"jsonrpc":"2.0","id":"` + rep("a", 100_000) + `","method":"x"}`), nil},
		{"unknown session", answers, "GET /mcp HTTP/1.1\r\n" + authorized + "Mcp-Session-Id: " + rep("a", 10_000) + "\r\n\r\n", nil},
		{"response to nothing", refused, mcp(`{"jsonrpc":"2.0","id":1,"result":{}}`), nil},
		{"long cursor", closed, mcp(`{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"cursor":"` + rep("a", 500_000) + `"}}`), nil},
		// Joining.
		{"enroll, garbage", refused, sized("/v1/enroll", rep("x", 16<<10)), nil},
		{"enroll, 1 MiB", refused, to("/v1/enroll", "Content-Length: 1048576\r\n", rep(" ", 100_000)), nil},
		{"token, deep", refused, sized("/v1/token", rep("[", 10_000)), nil},
		{"nonces, unread", answers, rep("GET /v1/enroll HTTP/1.1\r\nHost: localhost\r\n\r\n", 500), nil},
		// Device links.
		{"no subprotocol", closes, upgrade("dGhlIHNhbXBsZSBub25jZQ==", "13", "chat"), nil},
		{"WebSocket version 0", answers, upgrade("dGhlIHNhbXBsZSBub25jZQ==", "0", "agentctl.device.v2"), nil},
		{"bad WebSocket key", answers, upgrade("x", "13", "agentctl.device.v2"), nil},
		{"unmasked frame", closes, ws("\x81\x01a"), nil},
		{"reserved bits", closes, ws(frame(0xf1, "a")), nil},
		{"unknown opcode", closes, ws(frame(0x83, "a")), nil},
		{"binary frame", closes, ws(frame(0x82, "a")), nil},
		{"frame of 2^62 bytes", closes, ws("\x81\xff\x3f" + rep("\xff", 7) + "\x00\x00\x00\x00a"), nil},
		{"frame of 2^63 bytes", closes, ws("\x81\xff" + rep("\xff", 8) + "\x00\x00\x00\x00a"), nil},
		{"frame of 1 MiB", closes, ws(frame(0x81, rep("a", mb))), nil},
		{"fragments of one byte", closes, ws(frame(0x01, "a") + rep(frame(0x00, "a"), 20_000)), nil},
		{"empty fragments", closes, ws(frame(0x01, "") + rep(frame(0x00, ""), 20_000)), nil},
		{"continuation of nothing", closes, ws(frame(0x80, "a")), nil},
		{"message in a message", closes, ws(frame(0x01, "a") + frame(0x81, "a")), nil},
		{"fragmented ping", closes, ws(frame(0x09, "a")), nil},
		{"long ping", closes, ws(frame(0x89, rep("a", 200))), nil},
		{"ping flood, unread", waits, ws(rep(frame(0x89, rep("a", 125)), 20_000)), nil},
		{"pong flood", waits, ws(rep(frame(0x8a, "a"), 20_000)), nil},
		{"half a close code", closes, ws(frame(0x88, "a")), nil},
		{"close, unclosed", closes, ws(frame(0x88, "\x03\xe8")), nil},
		{"bad UTF-8 text", closes, text("\xff\xfe"), nil},
		{"message that is no JSON", closes, text("hello"), nil},
		{"message of brackets", closes, text(rep("[", 60<<10)), nil},
		{"auth with a long token", closes, envelope(`{"token":"` + rep("a", 60<<10) + `"}`), nil},
		{"auth with a bad token", closes, envelope(`{"token":"a.b.c","agent_version":"x","boot_id":"01m7wxg3khrt462w5zc25v99bb","instance_id":"0123456789abcdef0123456789abcdef"}`), nil},
		{"announce before auth", closes, text(`{"type":"announce","msg_id":"01m7wxg3khrt462w5zc25v99bb","payload":{}}`), nil},
		{"half a frame", waits, ws("\x81\xfe"), nil},
		{"silent link", waits, ws(""), nil},
		{"link, half-closed", closed, ws(""), closeWrite},
		{"link, reset", closed, ws(""), reset},
	}
	if len(list) < 100 {
		t.Errorf("%d kinds", len(list))
	}
	return list
}

// explode sends a bomb and returns how it ended otherwise than it should, "" if it did.
func (b *bomb) explode(addr, local string) string {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}, Timeout: patience}
	nc, err := d.Dial("tcp", addr)
	if err != nil {
		return err.Error()
	}
	c := nc.(*net.TCPConn)
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(patience))
	sent := make(chan struct{})
	in, send := bufio.NewReaderSize(c, 64<<10), b.send
	if upgrade, frames, ok := strings.Cut(b.send, endOfUpgrade); ok { // frames before the answer are not served
		_, _ = io.WriteString(c, upgrade)
		if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			close(sent)
			return fmt.Sprintf("no upgrade: %v, %v", resp, err)
		}
		send = frames
	}
	go func() { // the server may answer, or close, before it has taken all
		defer close(sent)
		_, _ = io.WriteString(c, send)
		if b.then != nil {
			b.then(c)
		}
	}()
	defer func() { _ = c.Close(); <-sent }()
	if b.end == waits {
		time.Sleep(500 * time.Millisecond) // and read nothing: a flood of pings waits for that
		return ""
	}
	var resp *http.Response
	if b.end != closes {
		resp, err = http.ReadResponse(in, nil)
	}
	switch {
	case b.end == closes:
	case b.end == closed && errors.Is(err, os.ErrDeadlineExceeded):
		return "neither an answer nor the end"
	case b.end == closed && err != nil: // it closed without an answer
		return ""
	case err != nil:
		return "no answer: " + err.Error()
	case b.end == answers && resp.StatusCode >= 200:
		return ""
	case b.end == refused && (resp.StatusCode < 400 || resp.StatusCode >= 600):
		return "answered " + resp.Status
	}
	// From the answer's end to the connection's: what came meanwhile belongs to the answer. For a
	// link it ends with the close frame, which follows hello.
	last := time.Now()
	for buf := make([]byte, 32<<10); ; {
		n, err := in.Read(buf)
		if n > 0 {
			last = time.Now()
		}
		if err != nil {
			if took := time.Since(last); took > 8*time.Second { // less than a header or an idle connection may take
				return fmt.Sprintf("closed %s after the answer", took.Round(time.Millisecond))
			}
			return ""
		}
	}
}

// figures of a process: resident memory, descriptors and goroutines.
type figures struct {
	rss             int64 // bytes
	fds, goroutines int
}

func figuresOf(t *testing.T, pid int, metricsURL string) (f figures) {
	t.Helper()
	resp, err := http.Get(metricsURL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "go_goroutines "); ok {
			f.goroutines, _ = strconv.Atoi(v)
		}
		if v, ok := strings.CutPrefix(lines.Text(), "process_resident_memory_bytes "); ok {
			n, _ := strconv.ParseFloat(v, 64)
			f.rss = int64(n)
		}
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	f.fds = len(entries)
	return f
}

// TestBombs throws every kind of hostile request at a relay: each ends as it should, and
// afterwards the relay has as many descriptors and goroutines as before. With AGENTCTL_SLOW=1 it
// does so 20 times, and the memory is back within 8 MiB, too.
func TestBombs(t *testing.T) {
	t.Parallel()
	slow := os.Getenv("AGENTCTL_SLOW") != ""
	dir := t.TempDir()
	token := createToken(t, dir, auth.MintRequest{Class: "admin"}).Token
	r := startRelay(t, dir, "--metrics-listen", "127.0.0.1:0")
	addr, pid := strings.TrimPrefix(r.url, "http://"), r.cmd.Process.Pid
	list := bombs(t, token)
	throw := func(round int) {
		var wg sync.WaitGroup
		for i := range list {
			wg.Go(func() {
				if problem := list[i].explode(addr, fmt.Sprintf("127.0.1.%d", 1+round)); problem != "" {
					t.Errorf("%s: %s", list[i].name, problem)
				}
			})
		}
		wg.Wait()
	}
	for i := range list { // what the first request of a tenant makes is kept for the next
		if list[i].name == "empty batch" {
			list[i].explode(addr, "127.0.0.1")
		}
	}
	figuresOf(t, pid, r.metricsURL) // the connection that it keeps is there before
	if slow {
		time.Sleep(10 * time.Second)
	}
	before := figuresOf(t, pid, r.metricsURL)
	rounds := 1
	if slow {
		rounds = 20
	}
	for i := range rounds {
		throw(i)
	}
	var now figures
	calm := func() bool {
		now = figuresOf(t, pid, r.metricsURL)
		return now.fds <= before.fds && now.goroutines <= before.goroutines && (!slow || now.rss <= before.rss+8<<20)
	}
	// In the slow run memory is compared too, which is returned when the relay is calm.
	if !poll(100*time.Millisecond, calm) && !(slow && poll(time.Second, calm)) {
		t.Fatalf("before %+v, afterwards %+v", before, now)
	}
	t.Logf("%d kinds; before %+v, afterwards %+v", len(list), before, now)
}
