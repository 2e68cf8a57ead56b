// Package test is what is tried on the whole: the import walls, the golden wire traces,
// the command line and the loop from end to end.
package test

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

// walls are the rules about who may know whom. From a package's imports a reader can
// tell what it may know; a wall is moved by editing its row, with the reason.
var walls = []struct {
	from   string   // package path below agentctl/, or a prefix that ends in /...
	never  []string // what it may not import: ours below agentctl/, or others by full path
	except []string // packages of from that the row does not bind
	why    string
}{
	{"manifest", []string{"agentctl/..."}, nil, "the vocabulary knows nobody"},
	{"transport/...", []string{"prober/...", "handlers/...", "control/...", "relay/...", "cmd/..."}, nil, "wires know no meaning"},
	{"transport/fanout", []string{"agentctl/..."}, nil, "ground imports nothing of ours"},
	{"strictjson", []string{"agentctl/..."}, nil, "ground imports nothing of ours"},
	{"transport/clock", []string{"agentctl/..."}, nil, "ground imports nothing of ours"},
	{"transport/netpoll", []string{"agentctl/..."}, nil, "ground imports nothing of ours"},
	{"transport/sse", []string{"manifest", "transport/link"}, nil, "streams know no link"},
	{"relay/...", []string{"prober/...", "handlers/...", "control/...", "cmd/..."}, nil, "the relay never runs on what a board is made of"},
	{"prober/...", []string{"relay/...", "handlers/...", "control/...", "transport/link", "cmd/..."}, nil, "the sampler serves everybody and knows nobody"},
	{"handlers/...", []string{"relay/...", "control/...", "transport/link", "cmd/..."}, nil, "what a device answers does not depend on the wire that asks"},
	{"control/...", []string{"relay/...", "handlers/...", "prober/history", "transport/link", "cmd/..."}, nil, "config and history reach the socket as small interfaces"},
	{"relay/pipeline", []string{"agentctl/..."}, nil, "middleware knows no request"},
	{"relay/kernel", []string{"relay/hub", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/eventlog", "relay/stages", "relay/plugins/...", "relay"}, nil, "the kernel is testable alone"},
	{"relay/hub", []string{"relay/kernel", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/eventlog", "relay/stages", "relay/plugins/...", "relay"}, nil, "devices are joined to the kernel in the root"},
	{"relay/auth", []string{"relay/kernel", "relay/hub", "relay/mcp/...", "relay/gateway", "relay/eventlog", "relay/stages", "relay/plugins/...", "relay", "transport/..."}, nil, "identities know no room"},
	{"relay/mcp", []string{"relay/hub", "relay/gateway", "relay/eventlog", "relay/stages", "relay/plugins/...", "relay", "transport/link"}, nil, "MCP reaches devices through the kernel only"},
	{"relay/mcp/stdio", []string{"manifest", "relay/...", "transport/link"}, nil, "the bridge carries messages and knows no room"},
	{"relay/eventlog", []string{"relay/hub", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/plugins/...", "relay"}, nil, "the log knows the form of events and nothing of their senders"},
	{"relay/stages", []string{"relay/hub", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/plugins/...", "relay"}, nil, "stages see requests, not doors or plugins"},
	{"relay/gateway", []string{"manifest", "transport/link", "relay/kernel", "relay/pipeline", "relay/stages", "relay/hub", "relay/mcp/...", "relay/auth", "relay/eventlog", "relay/plugins/...", "relay"}, nil, "topics, tokens and the log reach the gateway as small interfaces"},
	{"relay/plugins/...", []string{"relay/stages", "relay/eventlog", "relay/gateway", "relay/hub", "relay/mcp/...", "relay/auth", "relay", "transport/..."}, nil, "plugins use the kernel's API only"},
	{"...", []string{"github.com/spf13/..."}, []string{"cmd/..."}, "flags, files and environment are parsed in cmd and nowhere else"},
	{"...", []string{"github.com/shirou/gopsutil/..."}, []string{"prober/..."}, "one owner of the machine's readings"},
	{"...", []string{"github.com/gorilla/websocket"}, []string{"transport/link", "test/bench"}, "only the link speaks WebSocket (and the bare server that it is compared with)"},
	{"...", []string{"github.com/modelcontextprotocol/go-sdk/..."}, []string{"relay/mcp"}, "the SDK stays at the edge"},
	{"...", []string{"github.com/creachadair/jrpc2/..."}, []string{"control", "relay/plugins/process"}, "JSON-RPC is spoken on the box's socket and to plugins' processes"},
	{"...", []string{"github.com/santhosh-tekuri/jsonschema/..."}, []string{"manifest", "relay/plugins/process"}, "schemas are ours, or a plugin's"},
	{"...", []string{"github.com/golang-jwt/..."}, []string{"relay/auth"}, "one room reads tokens"},
	{"...", []string{"modernc.org/..."}, []string{"relay/auth", "relay/eventlog", "prober/history"}, "storage rooms own their database"},
	{"...", []string{"github.com/prometheus/..."}, []string{"relay"}, "rooms give Stats; the front door makes metrics of them"},
}

// rooms is what each package may import of ours, all in all: a new room needs a line here,
// and so does a new acquaintance of an old one. cmd, where the wings are joined, and test
// are free.
var rooms = map[string]string{
	"manifest":                  "",
	"transport/clock":           "",
	"transport/fanout":          "",
	"strictjson":                "",
	"transport/netpoll":         "",
	"transport/sse":             "transport/netpoll",
	"transport/enroll":          "manifest strictjson",
	"transport/link":            "manifest transport/clock transport/netpoll strictjson",
	"prober":                    "",
	"prober/alert":              "prober",
	"prober/history":            "prober",
	"handlers":                  "manifest prober",
	"control":                   "manifest prober transport/clock transport/fanout strictjson",
	"relay/auth":                "manifest",
	"relay/pipeline":            "",
	"relay/kernel":              "manifest relay/pipeline strictjson",
	"relay/eventlog":            "relay/kernel transport/fanout",
	"relay/hub":                 "manifest transport/fanout transport/link strictjson",
	"relay/gateway":             "transport/sse strictjson",
	"relay/stages":              "manifest relay/kernel relay/pipeline strictjson",
	"relay/mcp":                 "manifest relay/kernel strictjson",
	"relay/mcp/stdio":           "transport/sse strictjson",
	"relay/plugins/conformance": "relay/kernel",
	"relay/plugins/control":     "manifest relay/kernel",
	"relay/plugins/directory":   "manifest relay/kernel",
	"relay/plugins/process":     "manifest relay/kernel",
	"relay/plugins/tickets":     "manifest relay/kernel",
	"relay":                     "manifest relay/... transport/fanout transport/link transport/sse strictjson",
}

func TestRooms(t *testing.T) {
	for _, p := range list(t, "") {
		own := strings.TrimPrefix(p.ImportPath, "agentctl/")
		if matchesAny([]string{"cmd/...", "test/...", "docs/..."}, own) {
			continue
		}
		may, known := rooms[own]
		if !known {
			t.Errorf("%s has no line in rooms", own)
		}
		for _, imp := range p.Imports {
			if ours, isOurs := strings.CutPrefix(imp, "agentctl/"); isOurs && !matchesAny(strings.Fields(may), ours) {
				t.Errorf("%s imports %s, which is not in its line of rooms", own, ours)
			}
		}
	}
}

type pkg struct {
	ImportPath string
	Imports    []string
}

func TestWalls(t *testing.T) {
	for _, tags := range []string{"", "agentctl_omit_relay"} {
		pkgs := list(t, tags)
		if len(pkgs) < 10 {
			t.Fatalf("go list found %d packages", len(pkgs))
		}
		for _, w := range walls {
			for _, p := range pkgs {
				own := strings.TrimPrefix(p.ImportPath, "agentctl/")
				if !matches(w.from, own) || matchesAny(w.except, own) {
					continue
				}
				for _, imp := range p.Imports {
					ours, isOurs := strings.CutPrefix(imp, "agentctl/")
					for _, n := range w.never {
						if (n == "agentctl/..." && isOurs) || (isOurs && matches(n, ours)) || matches(n, imp) {
							t.Errorf("%s imports %s (tags %q): %s", p.ImportPath, imp, tags, w.why)
						}
					}
				}
			}
		}
	}
}

// TestBoardBuild: the board build has nothing of the relay in it.
func TestBoardBuild(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-tags", "agentctl_omit_relay", "agentctl/cmd/agentctl").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range strings.Fields(string(out)) {
		for _, banned := range []string{"agentctl/relay", "github.com/prometheus/", "github.com/modelcontextprotocol/", "github.com/santhosh-tekuri/", "github.com/golang-jwt/"} {
			if strings.HasPrefix(dep, banned) {
				t.Errorf("the board build contains %s", dep)
			}
		}
	}
}

func list(t *testing.T, tags string) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "-tags", tags, "agentctl/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var pkgs []pkg
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

func matches(pattern, path string) bool {
	if pattern == "..." {
		return true
	}
	if prefix, ok := strings.CutSuffix(pattern, "/..."); ok {
		return path == prefix || strings.HasPrefix(path, prefix+"/")
	}
	return path == pattern
}

func matchesAny(patterns []string, path string) bool {
	for _, p := range patterns {
		if matches(p, path) {
			return true
		}
	}
	return false
}
