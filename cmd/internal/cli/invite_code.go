package cli

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/enrollment"
	"agentctl/term"
)

// maxCode bounds what is read for a code, bytes. A code has 16 characters, plus hyphens, spaces and the end
// of the line; a file with more was named by mistake.
const maxCode = 1024

// ReadCode reads the code of join and login: from the argument, from standard input for "-", or from
// file unless that is empty. invite is the command that prints a code, for the error that none was given.
// Errors do not contain the code, which is a secret. For "-" on a terminal it asks for one line, which the
// terminal echoes.
func ReadCode(cmd *cobra.Command, args []string, file, invite string) (string, error) {
	var in io.Reader
	switch {
	case len(args) > 0 && file != "":
		return "", Errorf(ExitUsage, "give CODE or --code-file, not both")
	case file != "":
		f, err := os.Open(file)
		if err != nil {
			return "", Errorf(ExitFailure, "read the code: %w", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	case len(args) == 0:
		return "", Errorf(ExitUsage, "CODE is missing; get one on the relay's machine: %s", invite)
	case args[0] == "-":
		if term.IsTerminal(os.Stdin) {
			fmt.Fprint(cmd.ErrOrStderr(), "Code: ")
			in = oneLine{cmd.InOrStdin()}
		} else {
			in = cmd.InOrStdin()
		}
	default:
		in = strings.NewReader(args[0])
	}
	b, err := io.ReadAll(io.LimitReader(in, maxCode))
	if err != nil {
		return "", Errorf(ExitFailure, "read the code: %w", err)
	}
	code, err := enrollment.ParseCode(string(b))
	if err != nil {
		return "", Errorf(ExitUsage, "%w", err)
	}
	return code, nil
}

// oneLine ends with the first read: a terminal gives a line at a time, and no end of file.
type oneLine struct{ io.Reader }

func (r oneLine) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	if err == nil {
		err = io.EOF
	}
	return n, err
}
