package edge

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
)

// A request with both Content-Length and Transfer-Encoding has two lengths. A proxy that believes
// the one and a server that believes the other disagree where the next request begins, so that a
// client can smuggle one past the proxy's checks (RFC 9112 §6.3 and §11.2). net/http removes the
// Content-Length without a word before a handler sees the request. framingConn therefore reads
// along and spoils the second of the two header lines: net/http then answers 400 and closes the
// connection, after it has answered the requests before.
type framingListener struct {
	net.Listener
	server *Server
}

// Accept waits for the next connection.
func (l framingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	for err == nil && l.server.direct.isDraining() { // http.Server.Shutdown closes the listener after the drain
		_ = c.Close()
		c, err = l.Listener.Accept()
	}
	if err != nil {
		return nil, err
	}
	return &directConn{framingConn: framingConn{Conn: c}, server: l.server, handedOver: l.server.Direct == nil}, nil
}

// The names of the two header lines, in lower case, and the bits in framingConn.seen.
const (
	lengthName   = "content-length:"
	encodingName = "transfer-encoding:"

	lengthSeen   = 1
	encodingSeen = 2
)

// framingConn looks at the starts of lines only and does not know where a body ends. It does not
// have to: an empty line ends every head, and a body whose lines look like both headers is not
// JSON, which is all that our servers take.
type framingConn struct {
	net.Conn
	at   int8   // bytes of the line that have matched; restOfLine, afterCR
	name string // that the line may begin with
	seen uint8  // of the names, since the last empty line
}

// Values of framingConn.at when nothing is compared.
const (
	restOfLine = -1
	afterCR    = -2 // at the start of a line
)

// Read reads, and spoils what is ambiguous.
func (c *framingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.scan(b[:n])
	if err != nil {
		c.explainTLS(err)
	}
	return n, err
}

func (c *framingConn) scan(b []byte) {
	for i := 0; i < len(b); {
		switch ch := b[i]; {
		case c.at == restOfLine:
			end := bytes.IndexByte(b[i:], '\n')
			if end < 0 {
				return
			}
			i += end
			c.at = 0
		case c.at == afterCR && ch != '\n', c.at > 0 && lower(ch) != c.name[c.at]:
			c.at = restOfLine
			continue // ch may end the line
		case c.at > 0:
			if c.at++; int(c.at) == len(c.name) {
				c.at = restOfLine
				if c.found(); c.seen == lengthSeen|encodingSeen {
					b[i] = 0 // in place of the colon
				}
			}
		case ch == '\n': // an empty line
			c.at, c.seen = 0, 0
		case ch == '\r':
			c.at = afterCR
		case lower(ch) == lengthName[0]:
			c.at, c.name = 1, lengthName
		case lower(ch) == encodingName[0]:
			c.at, c.name = 1, encodingName
		default:
			c.at = restOfLine
			continue
		}
		i++
	}
}

func (c *framingConn) found() {
	if c.name == lengthName {
		c.seen |= lengthSeen
	} else {
		c.seen |= encodingSeen
	}
}

// lower is the lower case of an ASCII letter; other bytes that occur in the names stay.
func lower(ch byte) byte {
	if 'A' <= ch && ch <= 'Z' {
		return ch + 'a' - 'A'
	}
	return ch
}

// explainTLS answers a client that speaks HTTP to a TLS listener, as net/http does for
// connections that it knows to be TLS.
func (c *framingConn) explainTLS(err error) {
	var record tls.RecordHeaderError
	if !errors.As(err, &record) || record.Conn == nil {
		return
	}
	switch string(record.RecordHeader[:]) {
	case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO":
		_, _ = io.WriteString(record.Conn, "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n")
	}
}

// NetConn returns the connection below.
func (c *framingConn) NetConn() net.Conn { return c.Conn }

// Handover returns the connection below, for whoever has taken the connection from the HTTP server:
// no request will follow.
func (c *framingConn) Handover() net.Conn { return c.Conn }

// CloseWrite ends the sending side, so that net/http can close in two steps: a peer that still
// sends would otherwise lose the answer.
func (c *framingConn) CloseWrite() error {
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}
