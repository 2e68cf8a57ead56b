// Package test holds the tests of the whole product: the import rules, the golden wire
// traces, the command line, and board, relay and client running together.
package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
)

// rules forbid imports. A package's imports show what it may know. To
// change a rule, edit its row and give the reason in the same commit. Test code is exempt.
var rules = []struct {
	from      string   // package path below agentctl/, or a prefix that ends in /...
	forbidden []string // what it may not import: ours below agentctl/, others by full path
	except    []string // packages of from that the row does not bind
	why       string
}{
	{"manifest", []string{"prober/...", "handlers/...", "control/...", "transport/...", "relay/...", "cmd/..."}, nil, "every package uses the vocabulary, so it may depend on none of them but the JSON decoder"},
	{"duration", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"atomicfile", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"sqlitefile", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"suggest", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"lazyregexp", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"enrollment", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"mcplocal", []string{"daemon", "relay", "relay/hub", "transport/link", "cmd/..."}, nil, "it reaches the daemon through the control socket only"},
	{"joinctl", []string{"relay/...", "cmd/..."}, nil, "it joins a board from outside of its daemon"},
	{"doctor", []string{"relay/...", "cmd/..."}, nil, "the checks examine a board from outside"},
	{"daemon", []string{"doctor", "relay/...", "cmd/..."}, nil, "the device wing runs without the relay"},
	{"config", []string{"daemon", "control/...", "handlers/...", "relay/...", "cmd/..."}, nil, "settings do not depend on the parts that they configure"},
	{"transport/...", []string{"prober/...", "handlers/...", "control/...", "relay/...", "cmd/..."}, nil, "transports do not interpret what they carry"},
	{"transport/fanout", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"strictjson", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"unixrpc/...", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"transport/clock", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"transport/pin", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"transport/netpoll", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"transport/edge", []string{"transport/clock", "transport/enroll", "transport/fanout", "transport/link", "transport/pin", "transport/sse"}, nil, "what HTTP listeners share is independent of what they serve; it needs sockets only. The board build links it"},
	{"transport/sse", []string{"manifest", "transport/link"}, nil, "the SSE writer is independent of the device link"},
	{"relay/...", []string{"prober/...", "handlers/...", "control/...", "cmd/..."}, nil, "the relay does not depend on the daemon's packages"},
	{"prober/...", []string{"relay/...", "handlers/...", "control/...", "transport/link", "cmd/..."}, nil, "the sampler does not depend on its consumers"},
	{"handlers/...", []string{"relay/...", "control/...", "transport/link", "cmd/..."}, nil, "handlers do not depend on the transport of a request"},
	{"control/...", []string{"relay/...", "handlers/...", "prober/history", "transport/link", "cmd/..."}, nil, "configuration and history reach the control socket as small interfaces"},
	{"client", []string{"control/...", "prober/...", "handlers/...", "relay/...", "transport/link", "cmd/..."}, nil, "a client of a relay runs without either wing"},
	{"login", []string{"daemon", "control/...", "prober/...", "handlers/...", "relay/...", "client", "cmd/..."}, nil, "a context is used by clients and knows none of them"},
	{"clientconfig", []string{"client", "cmd/...", "config", "relay/..."}, nil, "it edits files of other programs and knows no relay"},
	{"monitor", []string{"relay/...", "handlers/...", "client", "transport/...", "cmd/..."}, nil, "it sees a daemon through the control socket only"},
	{"term", []string{"agentctl/..."}, nil, "drawing does not depend on what is drawn"},
	{"relay/pipeline", []string{"agentctl/..."}, nil, "middleware is generic over requests"},
	{"relay/kernel", []string{"relay/hub", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/eventlog", "relay/stages", "relay/plugins/...", "relay"}, nil, "the kernel is testable alone"},
	{"relay/hub", []string{"relay/kernel", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/eventlog", "relay/stages", "relay/plugins/...", "relay"}, nil, "package relay connects devices to the kernel"},
	{"relay/auth", []string{"relay/kernel", "relay/hub", "relay/mcp/...", "relay/gateway", "relay/eventlog", "relay/stages", "relay/plugins/...", "relay", "transport/..."}, nil, "identities do not depend on their users"},
	{"relay/mcp", []string{"relay/hub", "relay/gateway", "relay/eventlog", "relay/stages", "relay/plugins/...", "relay", "transport/link"}, nil, "MCP reaches devices through the kernel only"},
	{"relay/mcp/stdio", []string{"manifest", "relay/...", "transport/link"}, nil, "the bridge carries messages without interpreting them"},
	{"relay/audit", []string{"relay/hub", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/eventlog", "relay/plugins/...", "relay", "transport/link", "transport/sse"}, nil, "the audit log stores records and does not depend on their senders"},
	{"relay/eventlog", []string{"relay/hub", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/plugins/...", "relay"}, nil, "the event log stores events and does not depend on their senders"},
	{"relay/backup", []string{"relay/hub", "relay/mcp/...", "relay/gateway", "relay/stages", "relay/plugins/...", "relay", "transport/..."}, nil, "it copies files of stores, while the relay runs or not"},
	{"relay/topic", []string{"agentctl/..."}, nil, "a base package imports nothing of ours"},
	{"relay/storage", []string{"relay/..."}, nil, "every store reports to the monitor, which knows none of them"},
	{"relay/checkup", []string{"relay/kernel", "relay/hub", "relay/mcp/...", "relay/gateway", "relay/stages", "relay/plugins/...", "relay"}, nil, "the check examines stores, which need not be sound enough for a relay"},
	{"relay/stages", []string{"relay/hub", "relay/mcp/...", "relay/auth", "relay/gateway", "relay/plugins/...", "relay"}, nil, "stages see requests, not endpoints or plugins"},
	{"relay/gateway", []string{"transport/link", "relay/kernel", "relay/pipeline", "relay/stages", "relay/hub", "relay/mcp/...", "relay/auth", "relay/eventlog", "relay/plugins/...", "relay"}, nil, "topics, tokens and the log reach the gateway as small interfaces"},
	{"relay/plugins/...", []string{"relay/stages", "relay/eventlog", "relay/gateway", "relay/hub", "relay/mcp/...", "relay/auth", "relay", "transport/..."}, nil, "plugins use the kernel's API only"},
	{"cmd/internal/cli", []string{"daemon", "doctor", "demo", "handlers", "joinctl", "mcplocal", "relay/...", "cmd/..."}, nil, "every package of commands uses it, also those for macOS and Windows"},
	{"cmd/internal/boardcmd", []string{"relay/..."}, nil, "the board build contains it, without the relay"},
	{"cmd/internal/relaycmd", []string{"daemon", "doctor", "demo", "handlers", "joinctl", "mcplocal", "control/...", "prober/...", "relay/hub", "relay/mcp/...", "relay/gateway", "relay/plugins/...", "cmd/agentctl", "cmd/internal/boardcmd", "cmd/internal/clientcmd", "cmd/internal/plugincmd"}, nil, "it administers a relay from outside: over HTTP, or in its files"},
	{"cmd/internal/plugincmd", []string{"daemon", "doctor", "demo", "handlers", "joinctl", "mcplocal", "prober/...", "relay/hub", "relay/mcp/...", "relay/gateway", "relay/auth", "relay/kernel", "cmd/agentctl", "cmd/internal/boardcmd", "cmd/internal/clientcmd", "cmd/internal/relaycmd"}, nil, "a plugin is a folder and an entry of the control plane; neither needs the relay's parts"},
	{"cmd/internal/...", []string{"cmd/agentctl", "cmd/internal/boardcmd", "cmd/internal/clientcmd", "cmd/internal/eventscmd", "cmd/internal/mcpcmd", "cmd/internal/plugincmd", "cmd/internal/relaycmd"}, nil, "groups of commands meet in cmd/agentctl"},
	{"cmd/internal/clientcmd", []string{"daemon", "control/...", "monitor", "relay", "relay/kernel", "relay/hub", "relay/mcp/...", "relay/auth", "relay/plugins/..."}, nil, "a client reaches boards through a relay, by package client; verify needs the signatures of relay/stages only"},
	{"cmd/internal/mcpcmd", []string{"daemon", "control/...", "relay", "relay/kernel", "relay/hub", "relay/auth"}, nil, "the bridge calls a relay; mcplocal serves a board"},
	{"cmd/internal/serving", []string{"client", "control/...", "relay/hub", "relay/kernel", "relay/mcp/..."}, nil, "what two servers share knows neither of them; it has flags, signals and variables only"},
	{"...", []string{"github.com/spf13/..."}, []string{"cmd/..."}, "flags, files and environment are parsed in cmd"},
	{"...", []string{"github.com/spf13/cobra/doc"}, nil, "man pages are made by a test when packages are made; the generator stays out of the binary"},
	{"...", []string{"github.com/shirou/gopsutil/..."}, []string{"prober/..."}, "the sampler owns the machine's readings"},
	{"...", []string{"github.com/coreos/go-systemd/v22/dbus", "github.com/godbus/..."}, []string{"handlers"}, "systemd is asked over D-Bus in one place"},
	{"journal", []string{"prober/...", "handlers/...", "control/...", "transport/...", "relay/...", "cmd/..."}, nil, "the journal's helper runs with other rights and links little"},
	{"...", []string{"github.com/gorilla/websocket"}, []string{"transport/link"}, "WebSocket is an implementation detail of the link"},
	{"...", []string{"github.com/modelcontextprotocol/go-sdk/..."}, []string{"relay/mcp"}, "the MCP SDK stays behind relay/mcp"},
	{"...", []string{"github.com/creachadair/jrpc2/..."}, []string{"control", "relay/plugins/process", "relay/plugins/triage"}, "JSON-RPC is spoken on the control socket and to external plugins"},
	{"...", []string{"github.com/santhosh-tekuri/jsonschema/..."}, []string{"manifest", "relay/plugins/process", "relay/stages"}, "product schemas belong to manifest, those of external plugins to process; stages validate what they have rewritten"},
	{"...", []string{"github.com/golang-jwt/..."}, []string{"relay/auth"}, "tokens are issued and verified in one package"},
	{"...", []string{"modernc.org/..."}, []string{"sqlitefile", "relay/auth", "relay/eventlog", "relay/backup", "relay/storage", "prober/history"}, "a package that stores data owns its database; relay/backup copies them through SQLite; sqlitefile has what their files have in common; relay/storage knows SQLite's error codes"},
	{"...", []string{"github.com/prometheus/..."}, []string{"relay"}, "packages return Stats; package relay turns them into metrics"},
}

// allowed lists, for each package, every package of ours that it may import. A new package
// needs a line here, and so does a new import of ours. cmd and test are exempt.
var allowed = map[string]string{
	"atomicfile":                "",
	"clientconfig":              "atomicfile",
	"config":                    "atomicfile duration manifest prober prober/alert prober/history suggest transport/enroll transport/link transport/pin",
	"configctl":                 "config control",
	"daemon":                    "atomicfile config control enrollment handlers lazyregexp manifest prober prober/alert prober/history prober/inspect statedir transport/clock transport/enroll transport/link transport/pin",
	"doctor":                    "config control daemon duration prober term transport/clock transport/enroll transport/link transport/pin",
	"demo":                      "client config daemon manifest relay relay/auth relay/gateway transport/edge",
	"duration":                  "",
	"enrollment":                "",
	"journal":                   "lazyregexp strictjson unixrpc",
	"joinctl":                   "config control daemon transport/clock transport/enroll",
	"lazyregexp":                "",
	"login":                     "atomicfile config enrollment lazyregexp strictjson transport/enroll transport/link transport/pin",
	"manifest":                  "strictjson",
	"mcplocal":                  "control manifest relay/auth relay/kernel relay/mcp transport/edge",
	"sqlitefile":                "",
	"statedir":                  "atomicfile prober/history",
	"suggest":                   "",
	"transport/clock":           "",
	"transport/fanout":          "",
	"strictjson":                "",
	"unixrpc":                   "",
	"sqlitefile/sqlitefiletest": "",
	"unixrpc/unixrpctest":       "",
	"transport/netpoll":         "",
	"transport/pin":             "",
	"transport/sse":             "transport/netpoll",
	"transport/edge":            "manifest strictjson transport/netpoll",
	"transport/enroll":          "atomicfile enrollment manifest strictjson transport/link transport/pin",
	"transport/link":            "manifest strictjson transport/clock transport/edge transport/netpoll transport/pin",
	"prober":                    "",
	"prober/alert":              "prober",
	"prober/history":            "atomicfile prober sqlitefile",
	"prober/inspect":            "prober strictjson unixrpc",
	"handlers":                  "journal manifest prober prober/inspect unixrpc",
	"term":                      "",
	"monitor":                   "control duration prober prober/alert term",
	"client":                    "manifest strictjson transport/edge transport/sse transport/pin",
	"control":                   "manifest prober transport/clock transport/fanout strictjson",
	"relay/storage":             "manifest sqlitefile",
	"relay/topic":               "",
	"relay/auth":                "enrollment lazyregexp manifest relay/storage relay/topic sqlitefile suggest",
	"relay/backup":              "atomicfile lazyregexp manifest relay/auth relay/eventlog relay/storage sqlitefile strictjson",
	"relay/pipeline":            "",
	"relay/kernel":              "lazyregexp manifest relay/pipeline strictjson",
	"relay/audit":               "atomicfile relay/kernel relay/storage transport/edge",
	"relay/checkup":             "manifest relay/auth relay/eventlog sqlitefile",
	"relay/eventlog":            "atomicfile relay/kernel relay/storage sqlitefile transport/fanout",
	"relay/eventqueue":          "relay/kernel relay/storage",
	"relay/hub":                 "manifest transport/fanout transport/link strictjson",
	"relay/gateway":             "manifest relay/topic strictjson transport/edge transport/sse",
	"relay/stages":              "lazyregexp manifest relay/kernel relay/pipeline strictjson transport/edge",
	"relay/mcp":                 "lazyregexp manifest relay/kernel strictjson transport/edge transport/sse",
	"relay/mcp/stdio":           "transport/sse strictjson",
	"relay/plugins/arguments":   "lazyregexp manifest",
	"relay/plugins/conformance": "relay/kernel",
	"relay/plugins/control":     "lazyregexp manifest relay/kernel relay/plugins/arguments",
	"relay/plugins/directory":   "lazyregexp manifest relay/kernel relay/plugins/arguments",
	"relay/plugins/fleet":       "duration lazyregexp manifest relay/kernel relay/plugins/arguments suggest",
	"relay/plugins/process":     "atomicfile lazyregexp manifest relay/kernel relay/plugins/sandbox strictjson suggest",
	"relay/plugins/sandbox":     "",
	"relay/plugins/triage":      "",
	"relay/plugins/tickets":     "lazyregexp manifest relay/kernel relay/plugins/arguments",
	"relay":                     "enrollment lazyregexp manifest relay/... strictjson transport/clock transport/edge transport/fanout transport/link transport/sse",
}

func TestImportsAllowed(t *testing.T) {
	t.Parallel()
	for _, p := range listPackages(t, "") {
		path := strings.TrimPrefix(p.ImportPath, "agentctl/")
		if matchesAny([]string{"cmd/...", "test/...", "docs/..."}, path) {
			continue
		}
		list, ok := allowed[path]
		if !ok {
			t.Errorf("%s has no line in the table allowed", path)
		}
		for _, imp := range p.Imports {
			if ours, ok := strings.CutPrefix(imp, "agentctl/"); ok && !matchesAny(strings.Fields(list), ours) {
				t.Errorf("%s imports %s, which its line in the table allowed does not name", path, ours)
			}
		}
	}
}

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string // also the indirect ones
}

func TestImportRules(t *testing.T) {
	t.Parallel()
	for _, tags := range []string{"", "agentctl_omit_relay"} {
		pkgs := listPackages(t, tags)
		if len(pkgs) < 10 {
			t.Fatalf("go list found %d packages", len(pkgs))
		}
		for _, r := range rules {
			for _, p := range pkgs {
				path := strings.TrimPrefix(p.ImportPath, "agentctl/")
				if !matches(r.from, path) || matchesAny(r.except, path) {
					continue
				}
				for _, imp := range p.Imports {
					ours, isOurs := strings.CutPrefix(imp, "agentctl/")
					for _, f := range r.forbidden {
						if (f == "agentctl/..." && isOurs) || (isOurs && matches(f, ours)) || matches(f, imp) {
							t.Errorf("%s imports %s (tags %q): %s", p.ImportPath, imp, tags, r.why)
						}
					}
				}
			}
		}
	}
}

// TestBoardBuild checks that the board build links nothing of the relay.
func TestBoardBuild(t *testing.T) {
	t.Parallel()
	pkgs := listPackages(t, "agentctl_omit_relay")
	i := slices.IndexFunc(pkgs, func(p pkg) bool { return p.ImportPath == "agentctl/cmd/agentctl" })
	if i < 0 || len(pkgs[i].Deps) < 100 {
		t.Fatalf("go list found no command with its dependencies in %d packages", len(pkgs))
	}
	for _, dep := range pkgs[i].Deps {
		for _, banned := range []string{"agentctl/relay", "github.com/prometheus/", "github.com/modelcontextprotocol/", "github.com/santhosh-tekuri/", "github.com/golang-jwt/"} {
			if strings.HasPrefix(dep, banned) {
				t.Errorf("the board build contains %s", dep)
			}
		}
	}
}

// TestImportsOfClients checks that what macOS and Windows get is without the daemon and the relay,
// which need Linux. A file below cmd that imports them begins with //go:build linux.
func TestImportsOfClients(t *testing.T) {
	t.Parallel()
	for _, system := range []string{"darwin", "windows"} {
		cmd := exec.Command("go", "list", "-deps", "agentctl/cmd/agentctl")
		cmd.Env = append(cmd.Environ(), "GOOS="+system, "CGO_ENABLED=0")
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		deps := strings.Fields(string(out))
		for _, banned := range []string{"daemon", "doctor", "demo", "handlers", "joinctl", "mcplocal", "relay", "relay/audit", "relay/eventlog", "relay/hub", "relay/mcp"} {
			if slices.Contains(deps, "agentctl/"+banned) {
				t.Errorf("the build for %s contains %s", system, banned)
			}
		}
		if !slices.Contains(deps, "agentctl/client") {
			t.Errorf("go list found %d packages for %s", len(deps), system)
		}
	}
}

// listPackages lists the packages of this module as they are built with tags: "" or the one of the board
// build.
func listPackages(t *testing.T, tags string) []pkg {
	t.Helper()
	list := listFullBuild
	if tags != "" {
		list = listBoardBuild
	}
	pkgs, err := list()
	if err != nil {
		t.Fatal(err)
	}
	return pkgs
}

// Several tests need these lists; go list takes more time than any of them.
var (
	listFullBuild  = sync.OnceValues(func() ([]pkg, error) { return goList("") })
	listBoardBuild = sync.OnceValues(func() ([]pkg, error) { return goList("agentctl_omit_relay") })
)

func goList(tags string) (pkgs []pkg, err error) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,Deps", "-tags", tags, "agentctl/...").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var p pkg
		if err := dec.Decode(&p); err != nil {
			return nil, err
		}
		pkgs = append(pkgs, p)
	}
	return pkgs, nil
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
