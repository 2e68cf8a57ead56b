package checkup

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
)

// checkAuthority checks the relay's own certificate authority, and the server certificate that it has
// signed. The relay can renew a server certificate; a new authority would lock out every board, since
// boards know the relay by it.
//
// Only a relay with --tls own has the two files. It makes authority.pem first, so server.pem alone shows
// that the authority was lost. Dates are not checked: the relay renews its server certificate in time, and
// clients with a pin ignore them (package pin).
func (c *checker) checkAuthority(context.Context) (state, detail string) {
	authority, err := readCertificate(c.path("authority.pem"))
	switch {
	case errors.Is(err, fs.ErrNotExist) && !exists(c.path("server.pem")):
		return Absent, ""
	case errors.Is(err, fs.ErrNotExist):
		c.add(Problem{Store: "authority", Path: "authority.pem", What: "it is missing, and server.pem was signed by it: boards that know this relay by its authority would refuse a new one", Repair: RepairRestore})
		return "", ""
	case err != nil:
		c.fail("authority", "authority.pem", err, RepairRestore)
		return "", ""
	}
	if err := authority.CheckSignatureFrom(authority); err != nil {
		c.fail("authority", "authority.pem", fmt.Errorf("its certificate is not that of an authority: %w", err), RepairRestore)
		return "", ""
	}
	server, err := readCertificate(c.path("server.pem"))
	if err == nil {
		err = server.CheckSignatureFrom(authority)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.fail("authority", "server.pem", err, RepairRestart)
	}
	return "", "authority and server certificate, with their keys"
}

// readCertificate reads a file with a private key and its certificate, in PEM, and checks that the two
// belong together. The keys need not be of the type that the relay makes: an operator may have
// provided them.
func readCertificate(path string) (cert *x509.Certificate, err error) {
	b, err := readSmall(path, maxKeyFile)
	if err != nil {
		return nil, err
	}
	var key any
	for block, rest := pem.Decode(b); block != nil; block, rest = pem.Decode(rest) {
		switch block.Type {
		case "CERTIFICATE":
			if cert == nil { // others are of the chain
				cert, err = x509.ParseCertificate(block.Bytes)
			}
		case "PRIVATE KEY":
			key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
		case "EC PRIVATE KEY":
			key, err = x509.ParseECPrivateKey(block.Bytes)
		}
		if err != nil {
			return nil, err
		}
	}
	if cert == nil || key == nil {
		return nil, errors.New("it lacks a private key or a certificate")
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, errors.New("it has no key that signs")
	}
	if public, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(cert.PublicKey) {
		return nil, errors.New("its key is not that of its certificate")
	}
	return cert, nil
}
