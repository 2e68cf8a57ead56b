//go:build !agentctl_omit_relay

package clientcmd

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/manifest"
	"agentctl/relay/stages"
)

// verify recomputes what the stage sign of a relay signed (package relay/stages): an HMAC, so that whoever
// can verify an answer could also have made it, and the key file is a secret. It needs no relay, and works
// years later with a copy of the key.
//
// The signature covers the request, which an answer does not contain: the flags say what was requested.
// The exit code is 1 for any failure and 2 for a wrong combination of flags, so that a script can trust an
// answer on 0 alone.

// verified is what verify prints with -o, only for a good signature. Kid names the key, and Tool or URI
// what was verified with it.
type verified struct {
	Valid bool   `json:"valid"`
	Alg   string `json:"alg"`
	Kid   string `json:"kid"`
	Tool  string `json:"tool,omitempty"`
	URI   string `json:"uri,omitempty"`
}

// NewVerify returns the command verify, which checks the signature of a saved answer without a relay.
func NewVerify() *cobra.Command {
	var v verifyFlags
	c := &cobra.Command{
		Use:   "verify FILE",
		Short: "Check the signature of a saved answer of a relay",
		Long: `Check the signature of a saved answer of a relay whose stage sign is enabled (docs/kernel.md,
"Signatures"). FILE is an HTTP response with its headers (curl -i), a message or a result of MCP,
or - for stdin. The signature covers the tool or the resource, the nonce of the request and the
result, but an answer names neither the tool nor the nonce: give what was requested.

The exit code is 0 if the signature is good. It is 1 if it is not, or if there is none: then
trust nothing in the answer.`,
		Example: `  curl -i -H "Authorization: Bearer $(cat agent.token)" -H 'Content-Type: application/json' \
    -d '{"tool":"fleet.find","arguments":{}}' http://127.0.0.1:8460/mcp/tools/call > answer.http
  agentctl verify answer.http --key-file relay/keys/a --tool fleet.find
  agentctl verify result.json --key-file a.key --tool tickets.list --nonce 5f1c
  agentctl verify - --key-file a.key --uri mcp://agents/directory.json < result.json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return v.run(cmd, args[0]) },
	}
	v.out.AddFlags(c)
	f := c.Flags()
	f.StringVar(&v.keyFile, "key-file", "", "`FILE` with the key that the relay signs with (key_file of the stage sign)")
	f.StringVar(&v.tool, "tool", "", "`NAME` of the tool that was called")
	f.StringVar(&v.uri, "uri", "", "`URI` of the resource that was read; default: the one in the answer")
	f.StringVar(&v.nonce, "nonce", "", "`TEXT` that the request had as agentctl/nonce")
	return c
}

// verifyFlags are the flags of verify.
type verifyFlags struct {
	out                       cli.Output
	keyFile, tool, uri, nonce string
}

// run checks the answer in the file. The flags are checked again in complete, because which of them fit
// depends on whether the answer is a tool's or a resource's.
func (v *verifyFlags) run(cmd *cobra.Command, file string) error {
	switch {
	case v.keyFile == "":
		return cli.Errorf(cli.ExitUsage, "give the key that the relay signs with: --key-file STATE_DIR/keys/NAME, or a copy of it")
	case v.tool != "" && v.uri != "":
		return cli.Errorf(cli.ExitUsage, "give --tool for the answer of a tool, or --uri for that of a resource, not both")
	}
	key, err := stages.ReadKeyFile(v.keyFile)
	if err != nil {
		return fmt.Errorf("read the key: %w", err)
	}
	answer, err := readAnswer(cmd, file)
	if err != nil {
		return err
	}
	if err := v.complete(&answer.Message, file); err != nil {
		return err
	}
	if err := answer.Verify(key); err != nil {
		return notVerified(answer, v.keyFile, v.nonce, err)
	}
	good := verified{true, answer.Signature.Alg, answer.Signature.Kid, answer.Message.Tool, answer.Message.URI}
	return v.out.Print(cmd, good, func() error {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: the signature is good (%s, key %s)\n", file, good.Alg, good.Kid)
		return err
	})
}

// complete adds to a message from file what the signature covers but the answer does not have: the
// request. Data is empty for the answer of a tool.
//
// --uri replaces the URI in the answer: then a good signature shows that the answer is that of this read,
// and not of another one.
func (v *verifyFlags) complete(m *stages.Message, file string) error {
	switch {
	case m.Data == "" && v.uri != "":
		return cli.Errorf(cli.ExitUsage, "%s is the answer of a tool, not of a resource; use --tool", file)
	case m.Data == "" && v.tool == "":
		return cli.Errorf(cli.ExitUsage, "the signature covers the name of the tool that was called: add --tool NAME")
	case m.Data != "" && v.tool != "":
		return cli.Errorf(cli.ExitUsage, "%s is the answer of a resource, not of a tool; use --uri, or neither", file)
	case v.uri != "":
		m.URI = v.uri
	}
	m.Tool, m.Nonce = manifest.Canonical(v.tool), v.nonce // the relay signs the dotted name, whichever was called
	return nil
}

// readAnswer reads a saved answer from a file or, for -, from stdin, of stages.MaxAnswer bytes at most. An
// answer without a signature is an error with the way to get one.
func readAnswer(cmd *cobra.Command, path string) (*stages.SignedAnswer, error) {
	in, err := openInput(cmd, path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()
	data, err := io.ReadAll(io.LimitReader(in, stages.MaxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if len(data) > stages.MaxAnswer {
		return nil, fmt.Errorf("%s is larger than %d MiB, more than any answer", path, stages.MaxAnswer>>20)
	}
	answer, err := stages.ParseAnswer(data)
	switch {
	case errors.Is(err, stages.ErrUnsigned):
		return nil, fmt.Errorf("%s: %w in %s; save the whole answer with its headers (curl -i), and enable the stage: agentctl call kernel.middleware.enable name=sign", path, err, stages.MetaSignature)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return answer, nil
}

// notVerified explains a signature that is not good. The key id comes from the answer, and is quoted.
//
// What did not match cannot be known: a changed answer, another request and another key all give another
// signature. A forgotten nonce is a mistake of the command line, so that the hint names it where none was
// given.
func notVerified(a *stages.SignedAnswer, keyFile, nonce string, err error) error {
	if a.Signature.Alg != stages.Algorithm {
		return fmt.Errorf("the signature is of the kind %.32q; this agentctl checks %s", a.Signature.Alg, stages.Algorithm)
	}
	if !errors.Is(err, stages.ErrSignature) {
		return err
	}
	hint := "; if the request had a nonce, add --nonce"
	if nonce != "" {
		hint = ""
	}
	return fmt.Errorf("the signature does not match: the answer was changed, it is of another request, or %s is not the key %.64q%s", keyFile, a.Signature.Kid, hint)
}
