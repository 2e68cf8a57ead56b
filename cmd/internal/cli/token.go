package cli

import (
	"errors"
	"fmt"
	"io/fs"

	"agentctl/config"
)

// ReadToken reads the token file of a command, and adds the next step to an error. A file that
// other users may read is refused: a person is there to repair it.
func ReadToken(path string) (string, error) {
	token, err := config.ReadToken(path)
	var exposed *config.ExposedError
	switch {
	case errors.As(err, &exposed):
		return "", fmt.Errorf("%w, and use it in your place; make it yours: chmod 600 %s", err, ShellQuote(path))
	case errors.Is(err, fs.ErrPermission):
		return "", fmt.Errorf("%w; run this as the file's owner, or name your own file", err)
	case err != nil:
		return "", fmt.Errorf("%w; mint one on the relay with: agentctl token create", err)
	}
	return token, nil
}
