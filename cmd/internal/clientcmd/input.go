package clientcmd

import (
	"io"
	"os"

	"github.com/spf13/cobra"
)

// openInput opens a file, or for "-" the command's stdin, which Close leaves open: it is not ours. The
// caller bounds what it reads.
func openInput(cmd *cobra.Command, path string) (io.ReadCloser, error) {
	if path == "-" {
		return io.NopCloser(cmd.InOrStdin()), nil
	}
	return os.Open(path)
}
