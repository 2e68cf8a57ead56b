package clientconfig

import (
	"os"
	"path/filepath"
	"runtime"
)

// System is what the places of files depend on. It is a value, so that tests of one system check the places
// of all.
type System struct {
	OS     string // runtime.GOOS
	Home   string
	Getenv func(string) string
}

// ThisSystem returns the system of this process. Home is "" if the environment has none, as that of a service
// may: Path reports it.
func ThisSystem() System {
	home, _ := os.UserHomeDir()
	return System{OS: runtime.GOOS, Home: home, Getenv: os.Getenv}
}

// env returns the path in an environment variable if it is absolute, else a path below the home directory.
// The XDG specification says to ignore a relative path; with it the file would depend on where the client
// was started.
func (s System) env(name string, below ...string) string {
	if d := s.Getenv(name); filepath.IsAbs(d) {
		return d
	}
	return filepath.Join(append([]string{s.Home}, below...)...)
}

// config returns the directory of applications' configuration: Application Support on macOS,
// APPDATA on Windows, and XDG_CONFIG_HOME elsewhere.
func (s System) config(below ...string) string {
	var dir string
	switch s.OS {
	case "darwin":
		dir = filepath.Join(s.Home, "Library", "Application Support")
	case "windows":
		dir = s.env("APPDATA", "AppData", "Roaming")
	default:
		dir = s.env("XDG_CONFIG_HOME", ".config")
	}
	return filepath.Join(append([]string{dir}, below...)...)
}

// xdgOrAppData returns the path of programs that use ~/.config on macOS as well: unix below
// XDG_CONFIG_HOME, windows below APPDATA.
func (s System) xdgOrAppData(unix, windows []string) string {
	if s.OS == "windows" {
		return s.config(windows...)
	}
	return filepath.Join(append([]string{s.env("XDG_CONFIG_HOME", ".config")}, unix...)...)
}

// home returns a function for a path below the home directory, which is the same on every system.
func home(below ...string) func(System) string {
	return func(s System) string { return filepath.Join(append([]string{s.Home}, below...)...) }
}

// nextStart is the Restart of clients that read the file only when they start. Until then the entry has no
// effect, and a person would take it for one that does not work.
const nextStart = "restart it"

// mcpServers is the key that most clients use.
const mcpServers = "mcpServers"

// clients lists the clients in the order in which they are shown. The files and their forms are
// those of the clients' documentation; docs/clients.md names the pages.
//
// A row without Writable is a client whose file agentctl only describes: mcp config prints its entry. A row
// without http is one that cannot take a header from its environment. Rows differ in more than the path:
//
//	type          Claude Code and VS Code tell a program from a URL by it; the others by the keys
//	the URL       url, httpUrl (Gemini CLI) or serverUrl (Windsurf)
//	a variable    ${NAME} or ${env:NAME}; Codex has a key for the name of the variable
//
// A new client is a row, golden files (TestSnippets) and a row in docs/clients.md.
var clients = []*Client{
	{
		Name: "claude-code", Title: "Claude Code", Writable: true, Restart: "start a new session",
		container: mcpServers,
		path: func(s System) string {
			return filepath.Join(s.env("CLAUDE_CONFIG_DIR"), ".claude.json")
		},
		stdio: withType("stdio", stdioFields),
		http:  withType("http", headerFields("url", "${%s}")),
		owned: []string{"type", "command", "args", "url", "headers"},
	},
	{
		Name: "claude-desktop", Title: "Claude Desktop", Writable: true, Restart: nextStart,
		container: mcpServers,
		path:      func(s System) string { return s.config("Claude", "claude_desktop_config.json") },
		stdio:     stdioFields,
		owned:     []string{"command", "args"},
	},
	{
		Name: "cursor", Title: "Cursor", Writable: true, Restart: nextStart,
		container: mcpServers,
		path:      home(".cursor", "mcp.json"),
		stdio:     stdioFields,
		http:      headerFields("url", "${env:%s}"),
		owned:     []string{"type", "command", "args", "url", "headers"},
	},
	{
		Name: "vscode", Title: "VS Code", Writable: true, Restart: "start the server in its MCP view",
		container: "servers",
		path:      func(s System) string { return s.config("Code", "User", "mcp.json") },
		stdio:     withType("stdio", stdioFields),
		http:      withType("http", headerFields("url", "${env:%s}")),
		owned:     []string{"type", "command", "args", "url", "headers"},
	},
	{
		Name: "gemini", Title: "Gemini CLI", Writable: true, Restart: "start a new session",
		container: mcpServers,
		path: func(s System) string {
			return filepath.Join(s.env("GEMINI_CLI_HOME"), ".gemini", "settings.json")
		},
		stdio: stdioFields,
		http:  headerFields("httpUrl", "${%s}"),
		owned: []string{"type", "command", "args", "url", "httpUrl", "headers"},
	},
	{
		Name: "codex", Title: "Codex", Writable: true, Restart: "start a new session",
		format: formatTOML, container: "mcp_servers",
		path:  func(s System) string { return filepath.Join(s.env("CODEX_HOME", ".codex"), "config.toml") },
		stdio: stdioFields,
		http: func(s Server) []field {
			return []field{{"url", s.URL}, {"bearer_token_env_var", s.TokenEnv}}
		},
		owned: []string{"command", "args", "url", "bearer_token_env_var", "http_headers", "env_http_headers"},
	},
	{
		Name: "zed", Title: "Zed", Restart: "nothing: it reads the file again",
		container: "context_servers",
		path: func(s System) string {
			return s.xdgOrAppData([]string{"zed", "settings.json"}, []string{"Zed", "settings.json"})
		},
		stdio: func(s Server) []field { return append([]field{{"source", "custom"}}, stdioFields(s)...) },
	},
	{
		Name: "windsurf", Title: "Windsurf", Restart: "refresh its MCP servers",
		container: mcpServers,
		path:      home(".codeium", "windsurf", "mcp_config.json"),
		stdio:     stdioFields,
		http:      headerFields("serverUrl", "${env:%s}"),
	},
	{
		Name: "goose", Title: "goose", Restart: "start a new session",
		format: formatYAML, container: "extensions",
		path: func(s System) string {
			return s.xdgOrAppData([]string{"goose", "config.yaml"}, []string{"Block", "goose", "config", "config.yaml"})
		},
		stdio: gooseFields,
	},
	{
		Name: "lmstudio", Title: "LM Studio", Restart: "nothing: it reads the file again",
		container: mcpServers,
		path:      home(".lmstudio", "mcp.json"),
		stdio:     stdioFields,
	},
}
