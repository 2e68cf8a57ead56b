package gateway

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// hmacSecretAlias is the name of the HMAC secret in the source document, where a redaction
// replaced the original one. Both names are read.
const hmacSecretAlias = "MCP_SSE_HMAC_REDACTED_BY_AUDIT_ISSUE_70"

// Env is the configuration in the environment.
type Env struct {
	Options          // Listen, Heartbeat, Ring, SubscribeToken, IngestToken, HMACSecret, AllowOrigins
	IngestURL string // MCP_SSE_INGEST_URL: where the emit helper posts; default this gateway on loopback
	Include   bool   // MCP_INCLUDE_SSE: the relay starts the gateway too
}

// FromEnv reads these variables through getenv (os.Getenv). NAME_FILE may name a file that
// holds a token or secret instead. An empty variable counts as unset. The error joins
// everything that is wrong, one line per variable.
//
//	MCP_SSE_PORT           39300
//	MCP_SSE_HOST           loopback while subscribers need no token, else every address
//	MCP_SSE_HEARTBEAT_MS   15000
//	MCP_SSE_RING_MAX       500
//	MCP_SSE_AUTH_TOKEN     bearer token of subscribers
//	MCP_SSE_INGEST_TOKEN   bearer token of ingest; default MCP_SSE_AUTH_TOKEN
//	MCP_SSE_HMAC_SECRET    signs each event; also under the name that the document has
//	MCP_SSE_ALLOW_ORIGINS  web origins that may connect, separated by commas
//	MCP_SSE_INGEST_URL     http://127.0.0.1:PORT/model_context_protocol/2024-11-05/events
//	MCP_INCLUDE_SSE        1 or true: under the relay
func FromEnv(getenv func(string) string) (Env, error) {
	r := envReader{getenv: getenv}
	var e Env
	port := r.number("MCP_SSE_PORT", DefaultPort, 0, 65535)
	host := getenv("MCP_SSE_HOST")
	e.Listen = host + ":" + strconv.Itoa(port)
	if strings.Contains(host, ":") {
		e.Listen = "[" + strings.Trim(host, "[]") + "]:" + strconv.Itoa(port)
	}
	e.Heartbeat = time.Duration(r.number("MCP_SSE_HEARTBEAT_MS", 15000, 10, 3_600_000)) * time.Millisecond
	e.Ring = r.number("MCP_SSE_RING_MAX", 500, 1, maxRing)
	e.SubscribeToken = r.token("MCP_SSE_AUTH_TOKEN")
	e.IngestToken = r.token("MCP_SSE_INGEST_TOKEN")
	secret, literal := r.secret("MCP_SSE_HMAC_SECRET"), r.secret(hmacSecretAlias)
	if secret != "" && literal != "" && secret != literal {
		r.fail("MCP_SSE_HMAC_SECRET", "differs from "+hmacSecretAlias+"; set one of them")
	}
	if secret = cmp.Or(secret, literal); secret != "" {
		e.HMACSecret = []byte(secret)
	}
	e.AllowOrigins = r.origins("MCP_SSE_ALLOW_ORIGINS")
	e.IngestURL = r.url("MCP_SSE_INGEST_URL", "http://127.0.0.1:"+strconv.Itoa(port)+IngestPath)
	e.Include = r.boolean("MCP_INCLUDE_SSE")
	return e, errors.Join(r.errs...)
}

// envReader reads variables and collects what is wrong with them. After an error a method
// returns the default or the zero value; FromEnv's caller sees the error.
type envReader struct {
	getenv func(string) string
	errs   []error
}

func (r *envReader) fail(name, what string) {
	r.errs = append(r.errs, fmt.Errorf("%s %s", name, what))
}

// number reads a decimal number within bounds.
func (r *envReader) number(name string, def, minimum, maximum int) int {
	s := r.getenv(name)
	if s == "" {
		return def
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < minimum || n > maximum || s[0] == '+' {
		r.fail(name, fmt.Sprintf("is %q: a whole number from %d to %d", s, minimum, maximum))
		return def
	}
	return n
}

// secret reads a variable or the file that NAME_FILE names, as container platforms mount
// secrets; a line break at the end of the file is not part of it. Errors do not show it.
func (r *envReader) secret(name string) string {
	value, path := r.getenv(name), r.getenv(name+"_FILE")
	if path == "" {
		return value
	}
	if value != "" {
		r.fail(name, "and "+name+"_FILE are both set; set one of them")
		return ""
	}
	b, err := readSecretFile(path)
	if err != nil {
		r.fail(name+"_FILE", "cannot be read: "+err.Error())
		return ""
	}
	value = strings.TrimRight(string(b), "\r\n")
	if len(b) > maxSecret || value == "" {
		r.fail(name+"_FILE", "names "+path+", which is empty or has more than 4,096 bytes")
		return ""
	}
	return value
}

const maxSecret = 4096

// readSecretFile reads at most one byte more than maxSecret.
func readSecretFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxSecret+1))
}

// token reads a secret that is sent in a header.
func (r *envReader) token(name string) string {
	s := r.secret(name)
	if strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' }) {
		r.fail(name, "has a character that a bearer token cannot have (use visible ASCII without spaces)")
		return ""
	}
	return s
}

// origins reads a list of origins in the form that browsers send, scheme://host[:port]. A
// trailing slash is tolerated; every other difference would never match a browser's header.
func (r *envReader) origins(name string) []string {
	var list []string
	for o := range strings.SplitSeq(r.getenv(name), ",") {
		if o = strings.TrimSuffix(strings.TrimSpace(o), "/"); o == "" {
			continue
		}
		if u, ok := parseHTTP(o); !ok || u.Scheme+"://"+u.Host != o {
			r.fail(name, fmt.Sprintf("has %q: an origin is https://host or https://host:port", o))
			continue
		}
		list = append(list, o)
	}
	return list
}

// url reads an http or https URL.
func (r *envReader) url(name, def string) string {
	s := r.getenv(name)
	if s == "" {
		return def
	}
	if _, ok := parseHTTP(s); !ok {
		r.fail(name, fmt.Sprintf("is %q: http://host:port%s", s, IngestPath))
		return def
	}
	return s
}

// parseHTTP parses an http or https URL with a host.
func parseHTTP(s string) (u *url.URL, ok bool) {
	u, err := url.Parse(s)
	return u, err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != ""
}

// boolean reads the words that shells and unit files use.
func (r *envReader) boolean(name string) bool {
	switch s := strings.ToLower(r.getenv(name)); s {
	case "", "0", "false", "no", "off":
	case "1", "true", "yes", "on":
		return true
	default:
		r.fail(name, fmt.Sprintf("is %q: 1 or 0", s))
	}
	return false
}
