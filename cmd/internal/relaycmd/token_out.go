package relaycmd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/atomicfile"
	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
)

// tokenOut is where token create writes tokens: a file, or stdout. The file has one token a line, mode 0600,
// and if root writes it, the owner of its directory. A power cut leaves it whole or as it was.
type tokenOut struct {
	path  string // "": stdout
	force bool
}

func (o *tokenOut) addFlags(c *cobra.Command) {
	c.Flags().StringVar(&o.path, "out", "", "write to `FILE`, which must not exist, with mode 0600")
	c.Flags().BoolVar(&o.force, "force", false, "replace the file of --out")
}

// check refuses a file that exists, before a token is made; a symbolic link counts as one. write does not
// replace a file that is made after check either.
func (o *tokenOut) check() error {
	switch _, err := os.Lstat(o.path); {
	case o.path == "" && o.force:
		return cli.Errorf(cli.ExitUsage, "--force goes with --out")
	case o.path != "" && err == nil && !o.force:
		return o.exists()
	}
	return nil
}

// exists is the error of a file that is in the way.
func (o *tokenOut) exists() error {
	return cli.Errorf(cli.ExitFailure, "%s exists; name another file, or replace it with --force", o.path)
}

// write writes the tokens, one a line, unless -o prints them on stdout. It reports a stdout that
// takes nothing, such as a file on a full disk, because a token is shown once: the caller prints how
// to revoke the one that nobody has seen.
func (o *tokenOut) write(cmd *cobra.Command, created []auth.Minted) error {
	var text strings.Builder
	for _, m := range created {
		fmt.Fprintln(&text, m.Token)
	}
	if o.path == "" {
		// With -o the data has the tokens.
		if cmd.Flags().Changed("output") || cmd.Flags().Changed("json") {
			return nil
		}
		if _, err := fmt.Fprint(cmd.OutOrStdout(), text.String()); err != nil {
			return fmt.Errorf("write the token: %w", err)
		}
		return nil
	}
	write := atomicfile.Create
	if o.force {
		write = atomicfile.Replace
	}
	err := write(o.path, []byte(text.String()))
	if errors.Is(err, fs.ErrExist) {
		return o.exists()
	}
	if err != nil {
		return fmt.Errorf("write the token: %w", err)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "written to %s, which only its owner can read\n", o.path)
	return nil
}

// described returns what -o prints of the tokens: without those that are in a file.
func (o *tokenOut) described(created []auth.Minted) []auth.Minted {
	if o.path == "" {
		return created
	}
	created = slices.Clone(created)
	for i := range created {
		created[i].Token = ""
	}
	return created
}
