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

// certificateCheckInterval is the least time between two looks at the files, which happen
// during handshakes.
const certificateCheckInterval = 10 * time.Second

// ServerTLS returns a configuration that serves the certificate of two PEM files, and a
// renewed one within certificateCheckInterval.
func ServerTLS(certFile, keyFile string) (*tls.Config, error) {
	c, err := loadCertificate(certFile, keyFile)
	if err != nil {
		return nil, err
	}
	return c.config(), nil
}

func loadCertificate(certFile, keyFile string) (*certificate, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile}
	return c, c.load()
}

func (c *certificate) load() error {
	changed, err := c.newestModTime()
	if err != nil {
		return err
	}
	cert, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("load the certificate %s with the key %s: %w", c.certFile, c.keyFile, err)
	}
	c.cert, c.modTime = &cert, changed
	return nil
}

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

func (c *certificate) config() *tls.Config {
	return &tls.Config{GetCertificate: c.getCertificate, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
}
