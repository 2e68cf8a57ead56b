package auth

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"database/sql"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// Files of the relay's own authority. Each holds a private key and its certificate in PEM, so
// that one rename replaces both and a power cut leaves a pair that fits.
const (
	authorityFile = "authority.pem"
	serverFile    = "server.pem"
)

// Bounds of the authority and of the server certificate.
const (
	maxPairFile       = 16 << 10 // bytes
	maxServerNames    = 64       // in the certificate; a machine with containers has many addresses
	authorityLifetime = 30 * 365 * 24 * time.Hour
	serverLifetime    = 365 * 24 * time.Hour
	renewBefore       = serverLifetime / 3 // so that a clock that is set later finds a valid one
)

// renewInterval is how often Authority.Run checks whether the server certificate still fits.
const renewInterval = time.Minute

// firstBuild is the time of a build whose own time is not known.
var firstBuild = time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)

// AuthorityOptions configure a Store's Authority. Only Names is required.
type AuthorityOptions struct {
	// Names returns the host names and addresses that clients use. It is called again each
	// minute, as addresses change.
	Names func() []string
	// BuildTime is when certificates begin to be valid, because neither the relay's clock nor a
	// client's is behind it without being wrong. Zero: a date before the first release.
	BuildTime time.Time
}

// Authority is a relay's own certificate authority, for relays without a public certificate,
// and the server certificate that it signed. Clients know it by the hash of its key (package
// transport/pin). The keys are ECDSA P-256, which every TLS library has.
//
// The authority is made once and never replaced: every board of the relay would refuse a new
// one. The server certificate is replaced before it expires, and when the names change.
type Authority struct {
	store *Store
	opt   AuthorityOptions
	pair

	server atomic.Pointer[serverCert]
}

// pair is a private key and its certificate.
type pair struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

// serverCert is the server certificate as handshakes use it.
type serverCert struct {
	pair
	tls *tls.Certificate // the chain includes the authority, which clients with a pin look for
}

// Authority opens the relay's own authority, and makes it if there is none. Two processes that
// do so at once agree on one.
//
//	authority.pem           server.pem
//	missing                 missing             both are made
//	missing                 there               error: there was an authority
//	damaged                 any                 error
//	sound                   signed by it        served; made anew once it does not fit any more
//	sound                   missing, damaged    made anew
//	sound, of this relay    signed by another   made anew
//	sound, of another one   signed by another   error: somebody put a wrong file there
func (s *Store) Authority(o AuthorityOptions) (*Authority, error) {
	if o.BuildTime.Before(firstBuild) {
		o.BuildTime = firstBuild
	}
	a := &Authority{store: s, opt: o}
	err := s.withFiles(func() (err error) {
		a.pair, err = s.readAuthority()
		if errors.Is(err, fs.ErrNotExist) {
			a.pair, err = s.makeAuthority(o.BuildTime)
		}
		if err != nil {
			return err
		}
		return a.loadServer()
	})
	if err != nil {
		return nil, explain(s.dir.path, err)
	}
	return a, nil
}

// withFiles runs fn while no other process changes files of the state directory: the write
// lock of the database protects them. How long it waits is bounded by the database.
func (s *Store) withFiles(fn func() error) error {
	return s.db.write(context.Background(), func(*sql.Tx) error { return fn() }, nil)
}

// SHA256 is the hash of the authority's SubjectPublicKeyInfo, in hex: the pin of clients.
func (a *Authority) SHA256() string { return a.sha256() }

func (p pair) sha256() string {
	sum := sha256.Sum256(p.cert.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// PEM is the authority's certificate, for clients that take a file.
func (a *Authority) PEM() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}))
}

// GetCertificate implements tls.Config.GetCertificate: it runs in each handshake.
func (a *Authority) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return a.server.Load().tls, nil
}

// Run renews the server certificate before it expires and when the names change, until ctx
// ends. A failure is logged once and tried again; the old certificate stays.
func (a *Authority) Run(ctx context.Context) {
	a.store.runEvery(ctx, renewInterval, "renew the server certificate", func(context.Context) error {
		if a.fits(a.server.Load().pair) {
			return nil
		}
		return explain(a.store.dir.path, a.store.withFiles(a.renew))
	})
}

// readAuthority reads the authority. A file that was there and is gone or damaged is an error,
// and never a reason to make another authority: every board would be locked out.
func (s *Store) readAuthority() (pair, error) {
	p, err := s.readPair(authorityFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := s.dir.root.Lstat(serverFile); err == nil {
			return pair{}, fmt.Errorf("%s is missing, and %s shows that there was one, by which boards know this relay; restore it from a backup, "+
				"or remove %s too: the relay then makes a new authority, and every board and client that joined with the old one has to join again", authorityFile, serverFile, serverFile)
		}
		return pair{}, err
	case err == nil && !p.cert.IsCA:
		err = errors.New("its certificate is not of an authority")
	}
	if err != nil && !errors.Is(err, fs.ErrPermission) {
		return pair{}, fmt.Errorf("%s is damaged (%w); restore it from a backup, for boards know this relay by it, "+
			"or move it and %s away: the relay then makes a new authority, and every board and client that joined with the old one has to join again", authorityFile, err, serverFile)
	}
	return p, err
}

// makeAuthority makes the authority and its file. The caller holds the write lock.
func (s *Store) makeAuthority(notBefore time.Time) (pair, error) {
	tmpl := &x509.Certificate{
		Subject:   pkix.Name{CommonName: authorityName(s.relay.RelayID)},
		NotBefore: notBefore, NotAfter: s.latest(notBefore).Add(authorityLifetime),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	p, err := newPair(tmpl, nil)
	if err == nil {
		err = s.writePair(authorityFile, p)
	}
	if err == nil {
		s.log.Info("certificate authority made", zap.String("ca_sha256", p.sha256()))
	}
	return p, err
}

// authorityName is the name in the certificate of a relay's authority.
func authorityName(relayID string) string { return "agentctl relay " + relayID }

// latest is the present time, or floor when the clock is behind it.
func (s *Store) latest(floor time.Time) time.Time {
	if now := s.now(); now.After(floor) {
		return now
	}
	return floor
}

// loadServer reads the server certificate, or makes it when it is missing, damaged or no
// longer fits. The caller holds the write lock.
func (a *Authority) loadServer() error {
	p, err := a.store.readPair(serverFile)
	if err == nil && a.fits(p) {
		a.serve(p)
		return nil
	}
	if err == nil && p.cert.CheckSignatureFrom(a.cert) != nil && a.cert.Subject.CommonName != authorityName(a.store.relay.RelayID) {
		return fmt.Errorf("%s did not sign %s and is that of another relay (%s), so that no board that knows this relay by its authority would link; put the right file back, or restore a backup; "+
			"or move both away: the relay then makes a new authority, and every board and client that joined with the old one has to join again", authorityFile, serverFile, a.cert.Subject.CommonName)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.store.log.Warn("the server certificate is made anew", zap.String("file", serverFile), zap.Error(err))
	}
	return a.renew()
}

// renew makes a server certificate with a new key. It is served even if it cannot be stored:
// that costs nothing but another one at the next start. The caller holds the write lock.
func (a *Authority) renew() error {
	tmpl := &x509.Certificate{
		Subject:   pkix.Name{CommonName: "agentctl relay"},
		NotBefore: a.opt.BuildTime, NotAfter: a.store.latest(a.opt.BuildTime).Add(serverLifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	names := a.names()
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, name)
		}
	}
	p, err := newPair(tmpl, &a.pair)
	if err != nil {
		return err
	}
	a.serve(p)
	a.store.log.Info("server certificate made", zap.Strings("names", names), zap.Time("not_after", tmpl.NotAfter))
	return a.store.writePair(serverFile, p)
}

// names returns the names for the certificate, sorted, each once.
func (a *Authority) names() []string {
	var names []string
	for _, n := range a.opt.Names() {
		if ip := net.ParseIP(n); ip != nil {
			n = ip.String()
		}
		names = append(names, strings.ToLower(n))
	}
	slices.Sort(names)
	names = slices.Compact(names)
	return names[:min(len(names), maxServerNames)]
}

// fits reports whether a server certificate is of this authority, has the present names and
// stays valid for some time.
func (a *Authority) fits(p pair) bool {
	has := slices.Clone(p.cert.DNSNames)
	for _, ip := range p.cert.IPAddresses {
		has = append(has, ip.String())
	}
	slices.Sort(has)
	now := a.store.latest(a.opt.BuildTime)
	return slices.Equal(has, a.names()) && !p.cert.NotBefore.After(now) &&
		p.cert.NotAfter.Sub(now) > renewBefore && p.cert.CheckSignatureFrom(a.cert) == nil
}

// serve lets handshakes use a pair from now on.
func (a *Authority) serve(p pair) {
	a.server.Store(&serverCert{p, &tls.Certificate{Certificate: [][]byte{p.cert.Raw, a.cert.Raw}, PrivateKey: p.key, Leaf: p.cert}})
}

// newPair makes a key and a certificate for it, which parent signs; nil: its own key does.
func newPair(tmpl *x509.Certificate, parent *pair) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	parent = cmp.Or(parent, &pair{key, tmpl})
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent.cert, key.Public(), parent.key)
	if err != nil {
		return pair{}, err
	}
	cert, err := x509.ParseCertificate(der)
	return pair{key, cert}, err
}

// writePair stores a pair in one file. The caller holds the write lock.
func (s *Store) writePair(name string, p pair) error {
	der, err := x509.MarshalPKCS8PrivateKey(p.key)
	if err != nil {
		return err
	}
	return s.dir.replace(name, append(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.cert.Raw})...))
}

// readPair reads a file of writePair, and narrows its mode.
func (s *Store) readPair(name string) (pair, error) {
	b, err := s.dir.read(name, maxPairFile)
	if err == nil {
		err = s.dir.restrictMode(name)
	}
	if err != nil {
		return pair{}, err
	}
	keyBlock, rest := pem.Decode(b)
	certBlock, _ := pem.Decode(rest)
	if keyBlock == nil || certBlock == nil || keyBlock.Type != "PRIVATE KEY" || certBlock.Type != "CERTIFICATE" {
		return pair{}, errors.New("not a private key and a certificate in PEM")
	}
	cert, err := x509.ParseCertificate(certBlock.Bytes)
	if err != nil {
		return pair{}, err
	}
	parsed, err := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	if err != nil {
		return pair{}, err
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !key.PublicKey.Equal(cert.PublicKey) {
		return pair{}, errors.New("the key is not that of the certificate")
	}
	return pair{key, cert}, nil
}
