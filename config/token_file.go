package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"agentctl/transport/pin"
)

// maxToken is the longest token of any relay, bytes (docs/protocol.md, Tokens).
const maxToken = 4096

// ExposedError reports a token file that users other than its owner may read.
type ExposedError struct {
	Path string
	Mode fs.FileMode // permission bits
}

func (e *ExposedError) Error() string {
	return fmt.Sprintf("token file %s has mode %04o: other users may read it", e.Path, e.Mode)
}

// ReadToken reads a token file: the first line, trimmed.
//
// Whatever follows the first line is ignored, so that a file may have a comment below its token.
// At most four times the longest token is read, since the path may be that of any file.
//
// An ExposedError comes together with the token: a board must stay reachable, and serves.
//
// Its errors begin with "read the token" or "token file"; the daemon's hints for a link that
// is down depend on that.
func ReadToken(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, 4*maxToken))
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
	line = strings.TrimSpace(line)
	if line == "" {
		return "", fmt.Errorf("token file %s is empty", path)
	}
	// Other characters, and a longer text, do not fit the Authorization header.
	if len(line) > maxToken || strings.ContainsFunc(line, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("token file %s does not hold a token on its first line", path)
	}
	return line, checkExposed(f)
}

// checkExposed returns an ExposedError for a regular file that other users may read. A group counts
// as other users for a file of this user, as ssh has it for keys; one that root gave to a group on
// purpose, such as a systemd credential, is read by a member of the group.
func checkExposed(f *os.File) error {
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return nil // a pipe, as of a shell's <(command)
	}
	others := fs.FileMode(0o007)
	switch {
	case runtime.GOOS == "windows":
		return nil // modes mean nothing there: the access list of the directory decides
	case isOwn(st) && !isCredential(f.Name()):
		others = 0o077
	}
	if mode := st.Mode().Perm(); mode&others != 0 {
		return &ExposedError{f.Name(), mode}
	}
	return nil
}

// isCredential reports whether a path is in systemd's directory of credentials, whose files have
// the modes that systemd gives them.
func isCredential(path string) bool {
	dir := os.Getenv("CREDENTIALS_DIRECTORY")
	return dir != "" && filepath.Dir(path) == filepath.Clean(dir)
}

// ReadTokens reads the first n tokens of a file that holds one in each line.
//
// It serves fleets of mock boards. Unlike ReadToken it neither bounds the file nor checks the
// characters of the tokens. An ExposedError comes together with the tokens.
func ReadTokens(path string, n int) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the tokens: %w", err)
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("read the tokens: %w", err)
	}
	tokens := strings.Fields(string(b))
	if len(tokens) < n {
		return nil, fmt.Errorf("token file %s holds %d tokens, want %d", path, len(tokens), n)
	}
	return tokens[:n], checkExposed(f)
}

// ClientTLS trusts the system's certificate authorities, or only those of caFile, or only the
// relay's own authority with the hash caSHA256 (package pin).
//
// A given authority replaces those of the system: an operator with a private authority does
// not want a public one to vouch for the relay.
func ClientTLS(caFile, caSHA256 string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	switch {
	case caFile != "" && caSHA256 != "":
		return nil, errors.New("both ca_file and ca_sha256 are given; give one, as each of them decides alone whom to trust")
	case caSHA256 != "":
		return pin.ClientConfig(caSHA256)
	case caFile == "":
		return c, nil
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("read the certificate authority: %w", err)
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s does not hold a PEM certificate", caFile)
	}
	return c, nil
}
