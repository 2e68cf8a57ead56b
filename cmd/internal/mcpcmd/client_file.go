//go:build !agentctl_omit_relay

package mcpcmd

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"agentctl/clientconfig"
	"agentctl/cmd/internal/cli"
	"agentctl/term"
)

// The file belongs to another program, and to a person who has put work into it. So a change is shown as a
// diff before it is written, the old content is kept in a backup beside the file, and the file is replaced
// as a whole: a power cut leaves the old or the new one (clientconfig.File.Write).

// fileEdit has the flags of commands that change an MCP client's file.
type fileEdit struct {
	file        string // "" for where the client has it
	yes, dryRun bool
}

func (e *fileEdit) addFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&e.file, "file", "", "`PATH` of the client's file (default: where the client has it)")
	f.BoolVar(&e.yes, "yes", false, "write without asking")
	f.BoolVar(&e.dryRun, "dry-run", false, "show the change, and write nothing")
}

// findClient returns the client with this name, which must be one of those whose files agentctl edits. For
// another one the error names config, which prints the entry.
func findClient(name string) (*clientconfig.Client, error) {
	cl, err := clientconfig.Find(name)
	if err != nil {
		return nil, cli.Errorf(cli.ExitUsage, "%w", err)
	}
	if !cl.Writable {
		return nil, cli.Errorf(cli.ExitUsage, "agentctl does not edit the file of %s; print the entry with: agentctl mcp config %s", cl.Title, cl.Name)
	}
	return cl, nil
}

// apply reads the client's file, shows what change makes of its content, asks and writes. noChange is
// the format of the message if the content stays the same, with the path. done is false if nothing was
// written.
//
// If another program has changed the file meanwhile, nothing is written (clientconfig.ErrChanged).
//
// Without a terminal and without --yes it refuses (cli.Confirm), which is exit code 1, like an answer of
// no. --dry-run and a file without a change ask nothing.
func (e *fileEdit) apply(cmd *cobra.Command, cl *clientconfig.Client, noChange string, change func([]byte) ([]byte, error)) (done bool, err error) {
	path := e.file
	if path == "" {
		if path, err = cl.Path(clientconfig.ThisSystem()); err != nil {
			return false, fmt.Errorf("%w; name the file with --file", err)
		}
	}
	f, err := clientconfig.Read(path)
	if err != nil {
		return false, explainClientFile(cl, err)
	}
	after, err := change(f.Data)
	if err != nil {
		return false, explainClientFile(cl, &clientconfig.FileError{Path: f.Path, Err: err})
	}
	w := cmd.OutOrStdout()
	if bytes.Equal(after, f.Data) {
		_, err := fmt.Fprintf(w, noChange, f.Path)
		return false, err
	}
	// The file may have any bytes: what could control the terminal is replaced in the diff, not in the
	// file.
	if _, err := fmt.Fprint(w, term.SafeText(f.Diff(after))); err != nil {
		return false, err
	}
	if e.dryRun {
		_, err := fmt.Fprintf(w, "would write %s\n", f.Path)
		return false, err
	}
	if !e.yes {
		if err := cli.Confirm(cmd, "Write "+f.Path+"?"); err != nil {
			return false, err
		}
	}
	if err := f.Write(after); err != nil {
		return false, explainClientFile(cl, err)
	}
	if f.IsNew {
		_, err = fmt.Fprintf(w, "wrote %s, which is new\n", f.Path)
	} else {
		_, err = fmt.Fprintf(w, "wrote %s; what it held before is in %s\n", f.Path, f.BackupPath())
	}
	return true, err
}

// explainClientFile adds the next step to an error about a client's file, and says whether the file is
// unchanged, which is what people want to know first.
func explainClientFile(cl *clientconfig.Client, err error) error {
	path := ""
	if fe := new(clientconfig.FileError); errors.As(err, &fe) {
		path = fe.Path
	}
	switch {
	case errors.Is(err, clientconfig.ErrWritten): // first: the error of the disk may be any
		return cli.Errorf(cli.ExitFailure, "%w\nThe file has the change. Check the disk that it is on", err)
	case errors.Is(err, clientconfig.ErrNoHTTP):
		return cli.Errorf(cli.ExitUsage, "%s cannot take the token from its environment, and agentctl writes no token into a file; leave --http", cl.Title)
	case errors.Is(err, clientconfig.ErrSyntax), errors.Is(err, clientconfig.ErrShape), errors.Is(err, clientconfig.ErrTooLarge), errors.Is(err, clientconfig.ErrNotRegular):
		return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed. Repair the file, or add by hand what this prints: agentctl mcp config %s", err, cl.Name)
	case errors.Is(err, clientconfig.ErrReadOnly):
		return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed. Make the file writable: chmod u+w %s", err, cli.ShellQuote(path))
	case errors.Is(err, clientconfig.ErrChanged):
		return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed. Close %s, and type the command again", err, cl.Title)
	case errors.Is(err, fs.ErrPermission):
		return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed. Run this as the user of the client, or name another file with --file", err)
	}
	return cli.Errorf(cli.ExitFailure, "%w\nNothing was changed", err)
}
