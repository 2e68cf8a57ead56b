//go:build !agentctl_omit_relay

package mcpcmd

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/clientconfig"
	"agentctl/cmd/internal/cli"
)

// tokenEnv is the variable of an MCP client's environment that holds a token.
const tokenEnv = "MCP_TOKEN"

// An entry is what a client's file has of a server: a program with its arguments, or a URL
// (clientconfig.Server). There are four kinds:
//
//	a context       agentctl mcp [--context NAME]        the bridge refreshes the token with the context's key
//	a relay         agentctl mcp --relay URL ...         the bridge reads the token file with each request
//	--http          the URL of /mcp                      the client takes a long-lived token from MCP_TOKEN
//	--local         agentctl mcp --local                 no relay and no token
//
// A context that is the current one is not named: the entry then follows 'agentctl context use'. No kind
// writes a secret into the client's file.

// entryFlags are the flags that say what an MCP client is connected to, and so what its entry has.
type entryFlags struct {
	relay       cli.RelayFlags
	toolset     string
	http, local bool
}

func (e *entryFlags) addFlags(c *cobra.Command) {
	e.relay.ForMCP = true
	e.relay.AddFlags(c)
	f := c.Flags()
	f.StringVar(&e.toolset, "toolset", client.FleetToolset, toolsetUsage)
	f.BoolVar(&e.http, "http", false, "connect the client to the relay's URL, with the token of its environment variable "+tokenEnv+", instead of to 'agentctl mcp'")
	f.BoolVar(&e.local, "local", false, "connect the client to this board's daemon, without a relay")
}

// server returns what the client is connected to, and a hint for the user or "".
//
// The entry holds no secret: the bridge has the context, or the file with the token.
//
// The cases are in this order: --local, which rules out the rest; what contradicts itself, or names no
// relay at all; the toolset, for which the relay is asked; then the kind of the entry.
func (e *entryFlags) server(cmd *cobra.Command) (s clientconfig.Server, hint string, err error) {
	if e.local {
		if !cli.IsLinux {
			return s, "", errLocalNeedsLinux()
		}
		if e.http {
			return s, "", cli.Errorf(cli.ExitUsage, "--local serves a program on this board only; leave --http")
		}
		s.Command, err = selfPath()
		s.Args = []string{"mcp", "--local"}
		return s, "", err
	}
	saved, err := e.relay.Context()
	if err != nil {
		return s, "", err
	}
	// The default relay of other commands, on this machine, is not used: who names none has probably forgotten
	// to log in.
	isNamed := e.relay.IsSet("relay") || os.Getenv("AGENTCTL_RELAY") != ""
	switch {
	case e.http && saved != nil:
		return s, "", cli.Errorf(cli.ExitUsage, "--http needs a token that the client can keep, and those of context %s live for an hour; leave --http, or make one with: agentctl token create --class agent --out agent.token (on the relay's machine), and give: --http --relay %s", saved.Name(), cli.ShellQuote(saved.Relay()))
	case saved == nil && !isNamed:
		return s, "", cli.Errorf(cli.ExitUsage, "no relay to connect the client to; log in first, with the line that the relay's operator gets from: agentctl invite --agent NAME, or give --relay URL --token-file FILE")
	}
	if saved == nil { // find a wrong URL before it is in a file; http:// beyond loopback is refused only with a token
		if _, err := client.New(client.Options{URL: e.relay.URL, Token: "any"}); err != nil {
			return s, "", cli.Errorf(cli.ExitUsage, "--relay %w", err)
		}
	}
	toolsetHint, err := e.checkToolset(cmd.Context())
	if err != nil {
		return s, "", err
	}
	if e.http {
		s, hint, err = e.httpServer(cmd)
		return s, joinHints(toolsetHint, hint), err
	}
	if s.Command, err = selfPath(); err != nil {
		return s, "", err
	}
	s.Args = []string{"mcp"}
	if saved != nil {
		if current, _ := cli.ContextStore().Current(); saved.Name() != current {
			s.Args = append(s.Args, "--context", saved.Name())
		}
		// Some clients start programs with few variables.
		if d := os.Getenv("XDG_CONFIG_HOME"); filepath.IsAbs(d) {
			s.Env = []clientconfig.EnvVar{{Name: "XDG_CONFIG_HOME", Value: d}}
		}
	} else if hint, err = e.relayArgs(&s); err != nil {
		return s, "", err
	}
	// The bridge has the same default.
	if cmd.Flags().Changed("toolset") {
		s.Args = append(s.Args, "--toolset", e.toolset)
	}
	return s, joinHints(toolsetHint, hint), nil
}

// joinHints makes one hint of two, on two lines; either may be empty.
func joinHints(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "\n" + b
}

// toolsetTimeout bounds the request of checkToolset to the relay. Without an answer the entry is written all
// the same, after this wait.
const toolsetTimeout = 5 * time.Second

// checkToolset refuses a --toolset with a word that the relay does not know, before it is in a
// client's file, where only the model would see the refusal. Only the relay knows its plugins. A relay that
// cannot be asked now is no error: a client may be set up before its relay runs. A refusal with 400 is about
// the toolset; any other error, such as a refused token, becomes the hint.
func (e *entryFlags) checkToolset(ctx context.Context) (hint string, err error) {
	isPlugin := func(word string) bool { return !slices.Contains(client.Toolsets, word) }
	if !slices.ContainsFunc(strings.Split(e.toolset, ","), isPlugin) {
		return "", nil
	}
	rc, err := e.relay.Client()
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, toolsetTimeout)
		defer cancel()
		err = rc.CheckToolset(ctx, e.toolset)
	}
	if refused := new(client.Error); errors.As(err, &refused) && refused.Status == http.StatusBadRequest {
		return "", cli.Errorf(cli.ExitUsage, "--toolset %s: %s", e.toolset, refused.Message)
	}
	if err != nil {
		hint = fmt.Sprintf("the relay could not be asked whether it has the toolset %s: %v", e.toolset, err)
	}
	return hint, nil
}

// relayArgs adds the arguments that name a relay, without a context. Files are named by absolute paths,
// because a client starts the bridge in another directory. What the bridge would refuse at its start is
// refused now, when a person can see it.
func (e *entryFlags) relayArgs(s *clientconfig.Server) (hint string, err error) {
	s.Args = append(s.Args, "--relay", e.relay.URL)
	if e.relay.TokenFile == "" {
		hint = "no --token-file: the bridge takes the token from " + tokenEnv + " in the client's environment"
	} else if _, err := cli.ReadToken(e.relay.TokenFile); err != nil {
		return "", err
	}
	for _, file := range []struct{ flag, path string }{{"--token-file", e.relay.TokenFile}, {"--ca-file", e.relay.CAFile}} {
		if file.path == "" {
			continue
		}
		path, err := filepath.Abs(file.path)
		if err != nil {
			return "", err
		}
		s.Args = append(s.Args, file.flag, path)
	}
	if e.relay.CASHA256 != "" {
		s.Args = append(s.Args, "--ca-sha256", e.relay.CASHA256)
	}
	// Only to check the files and the pin: the bridge makes its own.
	if _, err := cli.ClientTLS(e.relay.CAFile, e.relay.CASHA256, e.relay.URL); err != nil {
		return "", err
	}
	return hint, nil
}

// httpServer is the entry of a client that calls the relay itself. It cannot have --ca-file or
// --ca-sha256: MCP clients trust the authorities of their system and know no pins.
//
// The entry names the variable and not its value, for clients that expand variables in headers; others are
// refused with clientconfig.ErrNoHTTP. The hint is the command that sets the variable, in the shell of
// this system.
func (e *entryFlags) httpServer(cmd *cobra.Command) (s clientconfig.Server, hint string, err error) {
	if e.relay.CAFile != "" || e.relay.CASHA256 != "" {
		return s, "", cli.Errorf(cli.ExitUsage, "MCP clients trust the authorities of their system only; leave --http, so that agentctl checks the relay's certificate")
	}
	s = clientconfig.Server{URL: client.MCPURL(e.relay.URL, e.toolset, true), TokenEnv: tokenEnv}
	file := e.relay.TokenFile
	if file == "" {
		file = "agent.token"
	}
	set := fmt.Sprintf("export %s=\"$(cat %s)\"", tokenEnv, cli.ShellQuote(file))
	if runtime.GOOS == "windows" { // in PowerShell
		set = fmt.Sprintf("$env:%s = Get-Content \"%s\"", tokenEnv, file)
	}
	return s, "the client takes the token from its environment; start it after: " + set, nil
}

// selfPath returns the absolute path of this program: the one that the shell found, because that one stays
// the same when a package is updated. On Linux os.Executable is the target of symbolic links, such as a
// directory with a version number. If the path that the shell would find is another program, it is used all
// the same.
func selfPath() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	found, err := exec.LookPath(os.Args[0])
	if err != nil {
		return self, nil
	}
	if found, err = filepath.Abs(found); err != nil {
		return self, nil
	}
	a, errA := os.Stat(self)
	b, errB := os.Stat(found)
	if errA != nil || errB != nil || !os.SameFile(a, b) {
		return self, nil
	}
	return found, nil
}
