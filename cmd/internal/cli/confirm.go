package cli

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/term"
)

// Confirm asks a question on a terminal, and returns nil for yes. A program cannot answer: without a
// terminal it refuses, and names the flag --yes of the command.
//
// The question goes to stderr, so that stdout has data alone. Anything but y and yes means no, and so does
// the end of the input (Ctrl-D). No is exit code 1 and not 0: the command has not done what it was typed for.
func Confirm(cmd *cobra.Command, question string) error {
	if !term.IsTerminal(os.Stdin) {
		return Errorf(ExitFailure, "%s\nThere is nobody to ask here; to say yes, add --yes", question)
	}
	fmt.Fprint(cmd.ErrOrStderr(), question+" [y/N] ")
	line, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if answer := strings.ToLower(strings.TrimSpace(line)); err == nil && (answer == "y" || answer == "yes") {
		return nil
	}
	return Errorf(ExitFailure, "nothing was changed")
}
