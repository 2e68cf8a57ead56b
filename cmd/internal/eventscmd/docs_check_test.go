//go:build linux && !agentctl_omit_relay

package eventscmd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The page has two scripts that check signatures. Both read a stream on stdin, and print a line for each
// event: "ok ID TOPIC" or "BAD ID TOPIC".
var checkScripts = []struct {
	file, program string
	needs         []string
}{
	{"check.sh", "sh", []string{"curl", "sh", "openssl"}},
	{"check.mjs", "node", []string{"curl", "node"}},
}

// signedEvents have data in which a shell, a regular expression or a JSON parser could see more than text.
var signedEvents = []struct{ topic, data string }{
	{"log/level", `{"previous":"info","current":"debug"}`},
	{"a.b-c_d", `{"text":" \\n \"'$HOME` + "`id`" + ` %s -n \t é 💡","sig":"no","d":"0","ts":1}`},
	{"n", `-1`},
	{"empty", `""`},
	{"nothing", `null`},
}

// The command line of the page finds every event of a gateway good.
func TestPageCheck(t *testing.T) {
	line := regexp.MustCompile(`(?m)^    (curl -sN .*) \| sh check\.sh$`).FindStringSubmatch(readPage(t))
	if line == nil {
		t.Fatalf("%s has no line that runs check.sh", eventsPage)
	}
	for _, tt := range checkScripts {
		t.Run(tt.file, func(t *testing.T) {
			skipWithout(t, tt.needs...)
			g := newSigningGateway(t)
			var want strings.Builder
			for _, e := range signedEvents {
				g.Emit("default", e.topic, json.RawMessage(e.data))
				fmt.Fprintf(&want, "ok %d %s\n", g.Stats().LastID, e.topic)
			}
			got, errs := firstLines(t, len(signedEvents), g.env, line[1]+" | "+tt.program+" "+pageScript(t, tt.file))
			if got != want.String() || errs != "" {
				t.Errorf("printed\n%s%s\nwant\n%s", got, errs, want.String())
			}
		})
	}
}

// firstLines returns the first n lines that a shell's pipeline prints, and its stderr. The pipeline does
// not end by itself: it is killed, with all of its processes, after those lines or after a minute.
func firstLines(t *testing.T, n int, env []string, pipeline string) (lines, errs string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "sh", "-c", pipeline)
	cmd.Env, cmd.Stderr = env, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for scanner := bufio.NewScanner(stdout); n > 0 && scanner.Scan(); n-- {
		lines += scanner.Text() + "\n"
	}
	cancel()
	_ = cmd.Wait() // it was killed
	return lines, stderr.String()
}

// Both scripts notice whatever is changed on the way: each part of an event that is signed, and the
// signature.
func TestPageCheckFindsChanges(t *testing.T) {
	g := newSigningGateway(t)
	g.Emit("default", "a/b", map[string]int{"x": 1})
	event := signedEvent(t, g.streamURL)
	changes := []struct{ name, old, new, want string }{
		{"nothing", "", "", "ok"},
		{"data", `{"x":1}`, `{"x":2}`, "BAD"},
		{"a blank in the data", `{"x":1}`, `{"x":1} `, "BAD"},
		{"the topic", "event: a/b", "event: a/c", "BAD"},
		{"the id", "id: ", "id: 1", "BAD"},
		{"the time", `"ts":`, `"ts":1`, "BAD"},
		{"the signature", `"sig":"`, `"sig":"0`, "BAD"},
		{"no signature", "data: {\"sig\"", "nodata: {\"sig\"", "BAD"},
	}
	var stream strings.Builder // with the changed events one after the other
	for _, c := range changes {
		changed := strings.Replace(event, c.old, c.new, 1)
		if c.old != "" && changed == event {
			t.Fatalf("%s: there is no %q in %q", c.name, c.old, event)
		}
		stream.WriteString(changed)
	}
	for _, tt := range checkScripts {
		t.Run(tt.file, func(t *testing.T) {
			skipWithout(t, tt.needs...)
			cmd := exec.Command(tt.program, pageScript(t, tt.file))
			cmd.Env, cmd.Stdin = g.env, strings.NewReader(stream.String())
			out, err := cmd.CombinedOutput()
			lines := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
			if err != nil || len(lines) != len(changes) {
				t.Fatalf("%v, printed %q, want a line for each of %d events", err, out, len(changes))
			}
			for i, c := range changes {
				if !strings.HasPrefix(lines[i], c.want+" ") {
					t.Errorf("%s: printed %q, want %s", c.name, lines[i], c.want)
				}
			}
		})
	}
}

// signedEvent reads the first event with a signature from a stream, with the empty line that ends it.
func signedEvent(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer sub")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	event := ""
	for scanner := bufio.NewScanner(resp.Body); scanner.Scan(); {
		line := scanner.Text()
		if line == "" && strings.Contains(event, `"sig"`) {
			return event + "\n"
		}
		if event += line + "\n"; line == "" {
			event = "" // a comment, or an event of the stream itself
		}
	}
	t.Fatalf("the stream ended without a signed event: %q", event)
	return ""
}
