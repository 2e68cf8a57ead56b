package cli

import (
	"errors"
	"fmt"
	"io/fs"

	"agentctl/config"
)

// ReadToken reads the token file of a command, and adds the next step to an error. A file that
// other users may read is refused: a person is there to repair it, while a daemon must keep its
// board reachable and only warns. A file that does not exist ends the command with
// ExitUnauthorized, as a missing token does; any other error with ExitFailure. Errors do not quote the file,
// which holds the token.
func ReadToken(path string) (string, error) {
	token, err := config.ReadToken(path)
	var exposed *config.ExposedError
	switch {
	case errors.As(err, &exposed):
		return "", fmt.Errorf("%w, and use it in your place; make it yours: chmod 600 %s", err, ShellQuote(path))
	case errors.Is(err, fs.ErrPermission):
		return "", fmt.Errorf("%w; run this as the file's owner, or name your own file", err)
	case errors.Is(err, fs.ErrNotExist): // no token, as far as a script is concerned
		return "", Errorf(ExitUnauthorized, "%w; create one on the relay with: agentctl token create", err)
	case err != nil:
		return "", fmt.Errorf("%w; create one on the relay with: agentctl token create", err)
	}
	return token, nil
}
