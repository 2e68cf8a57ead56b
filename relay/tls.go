package relay

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"agentctl/lazyregexp"
	"agentctl/relay/auth"
)

// Where the relay's certificate comes from, by Options.TLS:
//
//	TLSOwn     Relay.authority: made once and kept in the state directory; it signs a certificate for
//	           serverNames, and clients that joined know it by its hash
//	TLSFiles   Relay.certificate: two PEM files, read again when they change
//	TLSOff     none: on loopback, or behind a proxy that terminates TLS
//
// The event gateway uses the same one, unless its options have another (openGateway).

// Certificate is a PEM pair that is read again when its files change, so that a renewal needs
// no restart.
type Certificate struct {
	certFile, keyFile string

	mu        sync.Mutex // protects the fields below
	cert      *tls.Certificate
	modTime   time.Time // of the newer file
	checkedAt time.Time
}

// certificateCheckInterval is the minimum time between two checks of the files. A check is two
// stats in the goroutine of a handshake; without handshakes there are none.
const certificateCheckInterval = 10 * time.Second

// LoadCertificate reads the certificate of two PEM files.
func LoadCertificate(certFile, keyFile string) (*Certificate, error) {
	c := &Certificate{certFile: certFile, keyFile: keyFile}
	if err := c.load(); err != nil {
		return nil, err
	}
	return c, nil
}

// ServerTLS returns a configuration that serves the certificate, and a renewed one within
// certificateCheckInterval. It offers HTTP/1.1 only, since a stream needs a separate connection:
// HTTP/2 would multiplex it, and the unacknowledged bytes by which a stalled reader is found are
// those of a connection (docs/adr/0003).
func (c *Certificate) ServerTLS() *tls.Config { return serverConfig(c.getCertificate) }

// Reload reads the files now. If that fails, the pair of before stays.
func (c *Certificate) Reload() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.load()
}

func serverConfig(get func(*tls.ClientHelloInfo) (*tls.Certificate, error)) *tls.Config {
	return &tls.Config{GetCertificate: get, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
}

// openAuthority opens the relay's own authority if it is to serve one of its certificates, and
// stores where clients find the relay.
func (r *Relay) openAuthority() (err error) {
	if r.opt.TLS == TLSOwn {
		if r.authority, err = r.store.Authority(auth.AuthorityOptions{Names: r.serverNames, BuildTime: r.opt.BuildTime}); err != nil {
			return err
		}
		r.tls = serverConfig(r.authority.GetCertificate)
	}
	if r.listener == nil {
		return nil
	}
	return r.updateListenURL()
}

// updateListenURL finds out where other machines reach the listener, and stores it for invites.
func (r *Relay) updateListenURL() error {
	u := listenURL(r.listener.Addr().String(), r.tls != nil)
	r.listenURL.Store(&u)
	return r.store.SaveEndpoint(auth.Endpoint{URL: r.URL(), CASHA256: r.CASHA256(), PluginDir: r.pluginDirRecord()})
}

// followAddresses updates the URL of a relay that listens on every address, until ctx ends: it
// may start before the network does, and addresses change.
func (r *Relay) followAddresses(ctx context.Context) {
	if host, _, _ := net.SplitHostPort(r.listener.Addr().String()); !isUnspecified(host) {
		return
	}
	every(ctx, addressInterval, func() {
		if len(outboundAddresses()) == 0 {
			return // the network is away: the last address is the best guess
		}
		if err := r.updateListenURL(); err != nil {
			r.log.Warn("the relay's URL is not stored for invites", zap.Error(err))
		}
	})
}

// addressInterval is how often followAddresses checks. A check is two sockets that send nothing.
const addressInterval = 15 * time.Second

// CASHA256 is the hash by which clients know the relay's own authority (package transport/pin);
// "" without one.
func (r *Relay) CASHA256() string {
	if r.authority == nil {
		return ""
	}
	return r.authority.SHA256()
}

// authorityPEM is the certificate of the relay's own authority; "" without one.
func (r *Relay) authorityPEM() string {
	if r.authority == nil {
		return ""
	}
	return r.authority.PEM()
}

// serverNames are the names and addresses by which clients may know the relay: those of
// Options.Public and Options.Listen, and this machine's when it listens on every address. A
// client with a pin checks none of them; one that trusts the authority by a file does.
func (r *Relay) serverNames() []string {
	names := []string{"localhost", "127.0.0.1", "::1"}
	add := func(name string) {
		if net.ParseIP(name) != nil || hostNameRE.MatchString(name) {
			names = append(names, name)
		}
	}
	if r.public != nil {
		add(r.public.Hostname())
	}
	host, _, _ := net.SplitHostPort(r.opt.Listen)
	if host, _, _ = strings.Cut(host, "%"); !isUnspecified(host) { // without the zone of an IPv6 address
		add(host)
		return names
	}
	if name, err := os.Hostname(); err == nil {
		add(name)
	}
	names = append(names, outboundAddresses()...)
	addrs, _ := net.InterfaceAddrs() // fails in the packaged service, which may not use netlink
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			names = append(names, n.IP.String())
		}
	}
	return names
}

// hostNameRE are the names that a certificate can have (RFC 5280 §4.2.1.6). The name of a
// machine, or in a URL, may be anything; one that is left out works with a pin all the same.
var hostNameRE = lazyregexp.New(`^[A-Za-z0-9]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62}){0,8}$`)

// isUnspecified reports whether a host means every address.
func isUnspecified(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

// listenURL is the URL of a listener for other machines.
func listenURL(addr string, isTLS bool) string {
	if host, _, _ := net.SplitHostPort(addr); isUnspecified(host) {
		addr = reachableAddr(addr, append(outboundAddresses(), "127.0.0.1")[0])
	}
	return baseURL(addr, isTLS)
}

// outboundAddresses are the addresses of this machine from which it would reach others: those
// of the default routes, IPv4 first. There are none without a route. Connecting a UDP socket
// sends nothing, and the addresses belong to nobody (RFC 5737, RFC 3849).
func outboundAddresses() (list []string) {
	for _, to := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
		if c, err := net.Dial("udp", to); err == nil {
			list = append(list, c.LocalAddr().(*net.UDPAddr).IP.String())
			_ = c.Close()
		}
	}
	return list
}

// load reads the pair, and changes nothing if that fails. The caller holds mu, except before
// the certificate is shared.
func (c *Certificate) load() error {
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
func (c *Certificate) newestModTime() (newest time.Time, err error) {
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
func (c *Certificate) getCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
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
