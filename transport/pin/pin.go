// Package pin trusts a relay by the hash of its private certificate authority.
//
//	cfg, err := pin.ClientConfig(hash) // 64 hex digits, from the invite
//	conn := tls.Client(raw, cfg)
//
// A relay that has no public certificate makes a private authority (`relay --tls own`). The
// SHA-256 of that authority's key is its pin, which travels in the line that a person pastes.
// A client with a pin checks, before it sends anything:
//
//   - the relay sent a certificate whose key has that hash, and which is an authority
//   - that authority signed the relay's certificate, directly
//   - the relay holds the key of its certificate (crypto/tls does this)
//
// The pin replaces the system's authorities, the check of the host name and the validity dates:
// the key is the identity, a board is often addressed by a number that no certificate has, and
// a board's clock may be years off.
package pin

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
)

// Pin is the SHA-256 of an authority's SubjectPublicKeyInfo in DER. The hash is of the key and
// not of the certificate, so that an authority may renew its certificate.
type Pin [sha256.Size]byte

// String returns 64 lower case hex digits, which Parse reads.
func (p Pin) String() string { return hex.EncodeToString(p[:]) }

// Parse reads a pin: 64 hex digits.
func Parse(s string) (Pin, error) {
	var p Pin
	if n, err := hex.Decode(p[:], []byte(s[:min(len(s), 2*len(p))])); err != nil || n != len(p) || len(s) != 2*n {
		return Pin{}, fmt.Errorf("not the SHA-256 of an authority: %.80q (64 hex digits, as the relay and its invites print it)", s)
	}
	return p, nil
}

// Of returns the pin of an authority.
func Of(authority *x509.Certificate) Pin {
	return sha256.Sum256(authority.RawSubjectPublicKeyInfo)
}

// MismatchError means that the relay is not the one whose authority was pinned. Nothing but the
// TLS handshake was sent to it.
type MismatchError struct {
	Want Pin
	Got  Pin   // of the authority that the relay sent; zero: it sent none
	Err  error // why the authority Want, which the relay did send, does not vouch for it; else nil
}

func (e *MismatchError) Error() string {
	what := "it has no private authority"
	switch {
	case e.Err != nil:
		what = "its certificate is not one of that authority: " + e.Err.Error()
	case e.Got != Pin{}:
		what = fmt.Sprintf("it has another authority (%s)", e.Got)
	}
	return fmt.Sprintf("this is not the relay of the invite, whose authority has the SHA-256 %s: %s; nothing was sent. "+
		"Somebody may be intercepting the connection, the URL may be of another relay, or the relay was installed anew: "+
		"ask its operator, and get a new line to paste there with: agentctl invite", e.Want, what)
}

// Unwrap returns the reason of a certificate that the authority did not sign.
func (e *MismatchError) Unwrap() error { return e.Err }

// ClientConfig returns the TLS configuration of a client that trusts the relay with this pin
// and no other, see Parse.
func ClientConfig(caSHA256 string) (*tls.Config, error) {
	p, err := Parse(caSHA256)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		// It turns off the checks that the pin replaces. VerifyConnection runs in its place, in
		// resumed sessions too.
		InsecureSkipVerify: true,
		VerifyConnection:   func(s tls.ConnectionState) error { return p.Verify(s.PeerCertificates) },
	}, nil
}

// Verify checks the certificates that a relay sent, its own one first. Its error is a
// *MismatchError.
//
// The chain has no intermediate certificates: one would make the authority's reach a question
// of path building, and no relay makes them. The certificates between the two are ignored.
func (p Pin) Verify(chain []*x509.Certificate) error {
	e := &MismatchError{Want: p}
	for i, c := range chain {
		got := Of(c)
		if subtle.ConstantTimeCompare(got[:], p[:]) == 1 {
			if i == 0 {
				e.Err = errors.New("the authority's own key serves connections")
				return e
			}
			if e.Err = checkIssued(chain[0], c); e.Err == nil {
				return nil
			}
			// An attacker may send the authority's key in another certificate; the true
			// one may follow, and what it signed is signed by the key either way.
			continue
		}
		if i > 0 && c.IsCA && e.Got == (Pin{}) {
			e.Got = got
		}
	}
	return e
}

// checkIssued checks that ca is an authority which signed leaf, and that leaf is for a server.
// CheckSignatureFrom checks that ca is an authority that may sign certificates, and refuses
// broken hashes. Dates and names are not checked, see the package comment.
func checkIssued(leaf, ca *x509.Certificate) error {
	switch {
	case leaf.IsCA:
		return errors.New("it is an authority itself")
	case leaf.KeyUsage != 0 && leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0,
		!slices.ContainsFunc(leaf.ExtKeyUsage, func(u x509.ExtKeyUsage) bool {
			return u == x509.ExtKeyUsageServerAuth || u == x509.ExtKeyUsageAny
		}):
		return errors.New("it is not for a server")
	case len(leaf.UnhandledCriticalExtensions) > 0 || len(ca.UnhandledCriticalExtensions) > 0:
		return x509.UnhandledCriticalExtension{}
	}
	return leaf.CheckSignatureFrom(ca)
}
