package clientconfig

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
)

var update = flag.Bool("update", false, "write the golden files")

var (
	testStdio = Server{Command: "/usr/bin/agentctl", Args: []string{"mcp", "--context", "lab"}}
	testHTTP  = Server{URL: "https://relay.example:8460/mcp?toolset=fleet&names=flat", TokenEnv: "MCP_TOKEN"}
)

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
	}
}

// TestSnippets compares what is printed for each client with the form that its documentation
// shows.
func TestSnippets(t *testing.T) {
	withEnv := testStdio
	withEnv.Env = []EnvVar{{"XDG_CONFIG_HOME", "/srv/ann/config"}}
	for _, c := range clients {
		for name, server := range map[string]Server{"stdio": testStdio, "env": withEnv, "http": testHTTP} {
			text, err := c.Snippet(server)
			if server.URL != "" && c.http == nil {
				if !errors.Is(err, ErrNoHTTP) {
					t.Errorf("%s: %s: %v, want ErrNoHTTP", c.Name, name, err)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s: %s: %v", c.Name, name, err)
				continue
			}
			golden(t, c.Name+"."+name+".golden", text)
		}
	}
}

// TestEdits connects the files of testdata/edit and disconnects them again. The archives hold
// the file before, connected and disconnected.
func TestEdits(t *testing.T) {
	files, err := filepath.Glob("testdata/edit/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatal("no files", err)
	}
	for _, path := range files {
		t.Run(filepath.Base(path), func(t *testing.T) {
			a, err := txtar.ParseFile(path)
			if err != nil {
				t.Fatal(err)
			}
			c, err := Find(strings.TrimSpace(strings.TrimPrefix(string(a.Comment), "client:")))
			if err != nil {
				t.Fatal(err)
			}
			before := a.Files[0].Data
			connected, err := c.Connect(before, testStdio)
			if err != nil {
				t.Fatal(err)
			}
			disconnected, err := c.Disconnect(connected)
			if err != nil {
				t.Fatal(err)
			}
			got := &txtar.Archive{Comment: a.Comment, Files: []txtar.File{
				{Name: "before", Data: before}, {Name: "connected", Data: connected}, {Name: "disconnected", Data: disconnected}}}
			golden(t, filepath.Join("edit", filepath.Base(path)), txtar.Format(got))
			testAgain(t, c, connected)

			// The same with line ends of Windows.
			crlf := func(b []byte) []byte { return bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n")) }
			if bytes.Count(before, []byte("\n")) < 2 { // nothing shows that the file has them
				return
			}
			win, err := c.Connect(crlf(before), testStdio)
			if err != nil || !bytes.Equal(win, crlf(connected)) {
				t.Errorf("with CRLF: %q, %v, want %q", win, err, crlf(connected))
			}
			win, err = c.Disconnect(win)
			if err != nil || !bytes.Equal(win, crlf(disconnected)) {
				t.Errorf("with CRLF, disconnected: %q, %v, want %q", win, err, crlf(disconnected))
			}
		})
	}
}

// testAgain checks that a second edit changes nothing, and that one can change the kind of entry.
func testAgain(t *testing.T, c *Client, connected []byte) {
	t.Helper()
	if again, err := c.Connect(connected, testStdio); err != nil || !bytes.Equal(again, connected) {
		t.Errorf("connected again: %v\n%s\nwant\n%s", err, again, connected)
	}
	remote, err := c.Connect(connected, testHTTP)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(remote, []byte("/usr/bin/agentctl")) || !bytes.Contains(remote, []byte("relay.example")) {
		t.Errorf("connected by HTTP:\n%s", remote)
	}
	back, err := c.Connect(remote, testStdio)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(back, []byte("relay.example")) || bytes.Contains(back, []byte("MCP_TOKEN")) {
		t.Errorf("connected by stdio again:\n%s", back)
	}
	if none, err := c.Disconnect(remote); err != nil || bytes.Contains(none, []byte("relay.example")) {
		t.Errorf("disconnected: %v\n%s", err, none)
	}
}

// TestUndo checks that a file is byte for byte as before after connect and disconnect.
func TestUndo(t *testing.T) {
	for client, files := range map[string][]string{
		"cursor": {
			"{}\n", "// c\n{}", "{\"a\":1}", "{\n  \"a\": 1\n}\n", "{\n\t\"a\": 1, // x\n}\n", "{\n  \"mcpServers\": {\n    \"x\": {}\n  }\n}",
			"{\n  \"mcpServers\": {\n    \"x\": {} // y\n    // z\n  }\n}", "\ufeff{\n  \"a\": 1\n}", "{\"mcpServers\":{\"x\":{}}}",
		},
		"codex": {"a = 1\n", "[mcp_servers.x]\ncommand = \"y\"\n", "# c\n\n[a]\n# end\n", "a = '''\n[mcp_servers.agentctl]\n'''\n"},
	} {
		c, err := Find(client)
		if err != nil {
			t.Fatal(err)
		}
		for _, before := range files {
			connected, err := c.Connect([]byte(before), testStdio)
			if err != nil || bytes.Equal(connected, []byte(before)) {
				t.Errorf("%s: %q: %q, %v", client, before, connected, err)
				continue
			}
			if after, err := c.Disconnect(connected); err != nil || string(after) != before {
				t.Errorf("%s: connected %q, disconnected %q, %v; want %q", client, connected, after, err, before)
			}
		}
	}
}

func TestRefused(t *testing.T) {
	deep := strings.Repeat("[", 1<<20)
	for _, tt := range []struct {
		client, text string
		want         error
	}{
		{"cursor", `{"mcpServers": `, ErrSyntax},
		{"cursor", `{"a": 1} trailing`, ErrSyntax},
		{"cursor", "a = 1", ErrSyntax},
		{"cursor", "\x00\x01\x02", ErrSyntax},
		{"cursor", deep, ErrSyntax},
		{"cursor", `[]`, ErrShape},
		{"cursor", `"text"`, ErrShape},
		{"cursor", `{"mcpServers": []}`, ErrShape},
		{"cursor", `{"mcpServers": {"agentctl": "x"}}`, ErrShape},
		{"cursor", `{"mcpServers": {}, "mcpServers": {}}`, ErrShape},
		{"cursor", `{"mcpServers": {"agentctl": {"command": "a", "command": "b"}}}`, ErrShape},
		{"codex", "a = ", ErrSyntax},
		{"codex", "{}", ErrSyntax},
		{"codex", "a = 1\na = 2\n", ErrSyntax},
		{"codex", "a = " + deep, ErrSyntax},
		{"codex", "\ufeffa = 1\n", ErrSyntax},
		{"codex", "mcp_servers = {}\n", ErrShape},
		{"codex", "mcp_servers = 5\n", ErrShape},
		{"codex", "[[mcp_servers]]\na = 1\n", ErrShape},
		{"codex", "[[mcp_servers.agentctl]]\na = 1\n", ErrShape},
		{"codex", "[mcp_servers]\nagentctl = {command = 'x'}\n", ErrShape},
		{"codex", "mcp_servers.agentctl.command = 'x'\n", ErrShape},
	} {
		c, err := Find(tt.client)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := c.Connect([]byte(tt.text), testStdio); !errors.Is(err, tt.want) {
			t.Errorf("%s: connect %.60q: %q, %v, want %v", tt.client, tt.text, got, err, tt.want)
		}
		if got, err := c.Disconnect([]byte(tt.text)); tt.want == ErrSyntax && !errors.Is(err, tt.want) {
			t.Errorf("%s: disconnect %.60q: %q, %v, want %v", tt.client, tt.text, got, err, tt.want)
		}
	}
	if _, err := Find("claude"); !errors.As(err, new(*UnknownError)) || !strings.Contains(err.Error(), "claude-code") {
		t.Errorf("Find: %v", err)
	}
}

func TestPaths(t *testing.T) {
	vars := func(m map[string]string) func(string) string { return func(k string) string { return m[k] } }
	none := vars(nil)
	linux := System{OS: "linux", Home: "/home/ann", Getenv: none}
	mac := System{OS: "darwin", Home: "/Users/ann", Getenv: none}
	win := System{OS: "windows", Home: "/Users/ann", Getenv: none} // with the separator of this system
	moved := System{OS: "linux", Home: "/home/ann", Getenv: vars(map[string]string{
		"XDG_CONFIG_HOME": "/x", "CODEX_HOME": "/c", "CLAUDE_CONFIG_DIR": "/d", "GEMINI_CLI_HOME": "/g"})}
	relative := System{OS: "linux", Home: "/home/ann", Getenv: vars(map[string]string{"CODEX_HOME": "c"})}
	for _, tt := range []struct {
		client string
		s      System
		want   string
	}{
		{"claude-code", linux, "/home/ann/.claude.json"},
		{"claude-code", moved, "/d/.claude.json"},
		{"claude-desktop", linux, "/home/ann/.config/Claude/claude_desktop_config.json"},
		{"claude-desktop", mac, "/Users/ann/Library/Application Support/Claude/claude_desktop_config.json"},
		{"claude-desktop", win, "/Users/ann/AppData/Roaming/Claude/claude_desktop_config.json"},
		{"cursor", mac, "/Users/ann/.cursor/mcp.json"},
		{"vscode", linux, "/home/ann/.config/Code/User/mcp.json"},
		{"vscode", moved, "/x/Code/User/mcp.json"},
		{"vscode", mac, "/Users/ann/Library/Application Support/Code/User/mcp.json"},
		{"vscode", win, "/Users/ann/AppData/Roaming/Code/User/mcp.json"},
		{"gemini", linux, "/home/ann/.gemini/settings.json"},
		{"gemini", moved, "/g/.gemini/settings.json"},
		{"codex", linux, "/home/ann/.codex/config.toml"},
		{"codex", moved, "/c/config.toml"},
		{"codex", relative, "/home/ann/.codex/config.toml"},
		{"zed", mac, "/Users/ann/.config/zed/settings.json"},
		{"zed", win, "/Users/ann/AppData/Roaming/Zed/settings.json"},
		{"windsurf", linux, "/home/ann/.codeium/windsurf/mcp_config.json"},
		{"goose", linux, "/home/ann/.config/goose/config.yaml"},
		{"goose", win, "/Users/ann/AppData/Roaming/Block/goose/config/config.yaml"},
		{"lmstudio", linux, "/home/ann/.lmstudio/mcp.json"},
	} {
		c, err := Find(tt.client)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := c.Path(tt.s); filepath.ToSlash(got) != tt.want || err != nil {
			t.Errorf("%s on %s: %q, %v, want %q", tt.client, tt.s.OS, got, err, tt.want)
		}
	}
	if _, err := clients[0].Path(System{OS: "linux", Getenv: none}); err == nil {
		t.Error("a path without a home directory")
	}
}
