package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"agentctl/transport/pin"
)

// maxToken is the longest token of any relay, bytes (docs/protocol.md, Tokens).
const maxToken = 4096

// ReadToken reads a token file: the first line, trimmed.
//
// Whatever follows the first line is ignored, so that a file may have a comment below its token.
// At most four times the longest token is read, since the path may be that of any file.
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
	return line, nil
}

// ReadTokens reads the first n tokens of a file that holds one in each line.
//
// It serves fleets of mock boards. Unlike ReadToken it neither bounds the file nor checks the
// characters of the tokens.
func ReadTokens(path string, n int) ([]string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the tokens: %w", err)
	}
	tokens := strings.Fields(string(b))
	if len(tokens) < n {
		return nil, fmt.Errorf("token file %s holds %d tokens, want %d", path, len(tokens), n)
	}
	return tokens[:n], nil
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
