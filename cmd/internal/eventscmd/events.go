// Package eventscmd has the commands 'agentctl events': tail and emit, which use an event gateway from any
// machine, and serve and replay, which run where a gateway's or a relay's files are.
//
// # Two kinds of events
//
//	topic events     what programs publish to a gateway and subscribers receive (docs/events.md): tail.go,
//	                 emit.go, serve.go. A gateway is a part of a relay, or alone (serve).
//	the event log    what a relay has recorded of boards, agents and tickets (events.db): replay.go prints
//	                 it, replay_verify.go rebuilds the state from it
//
// A relay's gateway also publishes what the relay records about tickets, boards and agents (topics ticket,
// presence, and more in relay/topics.go): tail shows that live, and replay shows it from the disk without
// a gateway.
//
// # Builds
//
// events_full.go, serve.go, replay.go and replay_verify.go are in the full build on Linux only. The tests in
// docs_test.go run the scripts of docs/events.md and check its table.
package eventscmd

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
)

// NewClient returns the commands of a build without a relay. absent makes a hidden command in place of each
// that is missing, which says where it is: the documents mention serve and replay.
func NewClient(absent func(name string) *cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: "events", Short: "Subscribe to and publish topic events", Long: "Subscribe to and publish topic events of a gateway (docs/events.md)."}
	c.AddCommand(newTail(), newEmit(), absent("serve"), absent("replay"))
	return c
}

// newGateway makes the client of a gateway for the endpoint at path. flag is where a person gave the
// address, for the text of an error.
//
// The error is client.ErrURL, or client.ErrCleartext: a token is not sent over http:// beyond loopback. The
// exit code of both is 2.
func newGateway(flag string, o client.Options, path string) (*client.Gateway, error) {
	g, err := client.NewGateway(o, path)
	if err != nil {
		return nil, fmt.Errorf("%s %w", flag, err)
	}
	return g, nil
}

// envToken returns the token in an environment variable or in the file that NAME_FILE names, "" if
// neither is set. A file is the better place: other processes of the user see the environment. The variable
// takes precedence; 'events serve' refuses to have both (gateway.FromEnv).
func envToken(name string) (string, error) {
	if v := os.Getenv(name); v != "" {
		return v, nil
	}
	path := os.Getenv(name + "_FILE")
	if path == "" {
		return "", nil
	}
	token, err := cli.ReadToken(path)
	if err != nil {
		return "", fmt.Errorf("%s_FILE: %w", name, err)
	}
	return token, nil
}

// encodeLine writes v as one line of JSON. It leaves <, > and & as they are: the line is not part of a
// page, and scripts compare it with what was published.
func encodeLine(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
