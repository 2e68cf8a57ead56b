package clientcmd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/login"
	"agentctl/transport/enroll"
)

// loginTimeout bounds the exchange with the relay, repeats included, and the wait for the lock of the
// context's file, which another process holds while it refreshes the token.
const loginTimeout = time.Minute

// NewLogin returns the command login, which makes a context, the current one from then on. It may be
// repeated after any failure: package login stores the key before it sends the code, and the same key and
// code give the same identity without another use of the code. A power cut between both is such a failure.
//
// stdout has the context, without secrets; the sentence with the undo goes to stderr.
func NewLogin() *cobra.Command {
	var o login.Options
	var codeFile, caFile string
	var out cli.Output
	c := &cobra.Command{
		Use:   "login URL CODE",
		Short: "Log in to a relay as an agent or a person, with an invite",
		Long: `Log in to a relay. Get the line to paste on the relay's machine: agentctl invite --agent NAME

It makes a key, which is your identity at the relay, and stores it as a context with a token that
lasts an hour. Every command that talks to a relay then uses the context and refreshes the token
by itself, 'agentctl mcp' too. --relay or --token-file, and their variables, take precedence.

CODE may be - for standard input, which keeps it out of the list of processes.`,
		Example: `  agentctl login https://relay.example:8460 7K3M-9QTR-2HXW-DB5N --ca-sha256 HEX
  agentctl login https://relay.example:8460 - --context lab < code.txt
  agentctl context ls`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			// The flags are checked before the exchange, because it spends the code.
			o.Relay, o.Version = args[0], cli.Version
			if _, err := enroll.BaseURL(o.Relay); err != nil {
				return cli.Errorf(cli.ExitUsage, "%w", err)
			}
			if err := login.CheckName(o.Context); err != nil {
				return cli.Errorf(cli.ExitUsage, "--context: %w", err)
			}
			if o.Code, err = cli.ReadCode(cmd, args[1:], codeFile, "agentctl invite --agent NAME"); err != nil {
				return err
			}
			// A context keeps the path of an authority, or a pin, which replaces the path.
			if o.CASHA256 == "" {
				if o.CAFile, err = absolutePath(caFile); err != nil {
					return err
				}
			} else if _, err := config.ClientTLS(caFile, o.CASHA256); err != nil {
				return cli.Errorf(cli.ExitUsage, "--ca-sha256: %w", err)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), loginTimeout)
			defer cancel()
			i, before, err := cli.ContextStore().Login(ctx, o)
			if err != nil {
				return explainLogin(err, o.Context)
			}
			// The undo is to switch back, not to remove: the identity stays usable. Removal is the way
			// back only where no other context was current.
			undo := "agentctl context rm " + i.Name
			if before != "" && before != i.Name {
				undo = "agentctl context use " + before
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "Logged in to %s; context %s is now the current one. Undo it with: %s\nNext: agentctl ls\n", i.Relay, i.Name, undo)
			return out.Print(cmd, i, func() error { return printContexts(cmd, []login.Info{*i}) })
		},
	}
	f := c.Flags()
	f.StringVar(&o.CASHA256, "ca-sha256", "", "SHA-256 of the relay's own authority in `HEX`, as the invite has it: trust this relay and no other")
	f.StringVar(&caFile, "ca-file", "", "PEM `FILE` with the authority that signed the relay's certificate")
	f.StringVar(&o.Context, "context", cli.EnvOr("AGENTCTL_CONTEXT", login.DefaultName), "`NAME` of the context [AGENTCTL_CONTEXT]")
	f.StringVar(&codeFile, "code-file", "", "`FILE` with the code, in place of CODE")
	out.AddFlags(c)
	return c
}

// absolutePath makes a path of a flag absolute, because a context is used in other directories too. It has
// the checks of the key ca_file of a board's configuration, whose errors name what is wrong.
func absolutePath(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	v, err := config.FindKey("ca_file").Parse(path)
	if err != nil {
		return "", cli.Errorf(cli.ExitUsage, "--ca-file %w", err)
	}
	return v.(string), nil
}

// explainLogin adds the next step to an error of a login; name is that of the context. Others, such as
// ctx's, are left to cli.Explain.
func explainLogin(err error, name string) error {
	var other *login.OtherRelayError
	var file *login.FileError
	var e *enroll.Error
	switch {
	case errors.As(err, &other):
		return cli.Errorf(cli.ExitFailure, "%w; log in under another name with --context NAME, or remove it with: agentctl context rm %s", err, other.Name)
	case errors.As(err, &file):
		return cli.ExplainContextFile(file, "do the same again: the code is not lost")
	// The code is used up, so that a repeat is not the next step.
	case errors.Is(err, login.ErrForBoard):
		return cli.Errorf(cli.ExitUnauthorized, "%w; get another with: agentctl invite --agent NAME", err)
	case errors.Is(err, login.ErrCleartextPin):
		return cli.Errorf(cli.ExitUsage, "--ca-sha256: %w", err)
	case errors.As(err, &e):
		return cli.ExplainEnroll(err, e, name)
	}
	return err
}
