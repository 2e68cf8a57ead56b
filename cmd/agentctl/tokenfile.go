package main

import (
	"errors"
	"fmt"
	"io/fs"

	"agentctl/config"
)

// readToken reads the token file of a command, and adds the next step to an error.
func readToken(path string) (string, error) {
	token, err := config.ReadToken(path)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return "", fmt.Errorf("%w; run this as the file's owner, or name a file of your own", err)
	case err != nil:
		return "", fmt.Errorf("%w; mint one on the relay with: agentctl token create", err)
	}
	return token, nil
}
