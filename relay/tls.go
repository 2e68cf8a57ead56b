package relay

import (
	"crypto/tls"
	"fmt"
	"os"
	"sync"
	"time"
)

// certificate is a PEM pair that is read again when its files change, so that a renewal needs
// no restart.
type certificate struct {
	certFile, keyFile string

	mu        sync.Mutex // protects the fields below
	cert      *tls.Certificate
	modTime   time.Time // of the newer file
	checkedAt time.Time
}

// certificateCheckInterval is the minimum time between two checks of the files. A check is two
// stats in the goroutine of a handshake; without handshakes there are none.
const certificateCheckInterval = 10 * time.Second

// ServerTLS returns a configuration that serves the certificate of two PEM files, and a
// renewed one within certificateCheckInterval. It offers HTTP/1.1 only, since a stream
// needs a separate connection: HTTP/2 would multiplex it, and the unacknowledged bytes by
// which a stalled reader is found are those of a connection (docs/adr/0003).
func ServerTLS(certFile, keyFile string) (*tls.Config, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile}
	if err := c.load(); err != nil {
		return nil, err
	}
	return &tls.Config{GetCertificate: c.getCertificate, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}, nil
}

// load reads the pair, and changes nothing if that fails. The caller holds mu, except before
// the certificate is shared.
func (c *certificate) load() error {
	modTime, err := c.newestModTime()
	if err != nil {
		return err
	}
	cert, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("load the certificate %s with the key %s: %w", c.certFile, c.keyFile, err)
	}
	c.cert, c.modTime = &cert, modTime
	return nil
}

// newestModTime changes when a file was replaced, and costs two stats.
func (c *certificate) newestModTime() (newest time.Time, err error) {
	for _, f := range []string{c.certFile, c.keyFile} {
		st, err := os.Stat(f)
		if err != nil {
			return newest, fmt.Errorf("certificate: %w", err)
		}
		if st.ModTime().After(newest) {
			newest = st.ModTime()
		}
	}
	return newest, nil
}

// getCertificate implements tls.Config.GetCertificate: it runs in each handshake.
func (c *certificate) getCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); now.Sub(c.checkedAt) > certificateCheckInterval {
		c.checkedAt = now
		if m, err := c.newestModTime(); err == nil && !m.Equal(c.modTime) {
			_ = c.load() // fails for half-written files; the old pair stays
		}
	}
	return c.cert, nil
}
