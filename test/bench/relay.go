//go:build linux

package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// relayProc is a relay under test, with a token of an agent and of its devices.
type relayProc struct {
	*process
	url, addr string
	state     string
	token     string // an agent's
	tokens    string // file with the devices' tokens
	ca        string // the authority's file; "" for a plain relay
	nodes     []string
}

// relayOptions of startRelay.
type relayOptions struct {
	devices int // device tokens to create
	tls     bool
	class   string   // of the agent's token; "": agent
	onCore  bool     // on the servers' core only
	args    []string // more flags of "agentctl relay"
}

// startRelay makes the state of a relay and runs it on a free port of loopback.
func (b *bench) startRelay(name string, o relayOptions) (*relayProc, error) {
	r := &relayProc{state: filepath.Join(b.dir, name)}
	if err := os.MkdirAll(r.state, 0o700); err != nil {
		return nil, err
	}
	if err := r.createTokens(b, o); err != nil {
		return nil, err
	}
	return r, r.run(b, name, o)
}

// run starts the relay on its state.
func (r *relayProc) run(b *bench, name string, o relayOptions) error {
	program, args := b.agentctl, []string{"relay", "--listen", "127.0.0.1:0", "--metrics-listen", "", "--state-dir", r.state}
	if b.profile != "" {
		program, args = b.self, []string{"serve", "relay", "--state-dir", r.state, "--profile", filepath.Join(b.profile, name)}
	}
	if o.tls {
		cert, key, err := makeCertificate(b.dir)
		if err != nil {
			return err
		}
		r.ca = cert
		args = append(args, "--tls-cert", cert, "--tls-key", key)
	}
	launch := start
	if o.onCore {
		launch = startOnServerCore
	}
	var line string
	var err error
	r.process, line, err = launch(time.Minute, func(l string) bool { return strings.HasPrefix(l, `{`) && strings.Contains(l, `"ready":true`) }, program, append(args, o.args...)...)
	if err != nil {
		return err
	}
	var ready struct{ URL string }
	if err := json.Unmarshal([]byte(line), &ready); err != nil {
		return err
	}
	u, err := url.Parse(ready.URL)
	if err != nil {
		return err
	}
	r.url, r.addr = ready.URL, u.Host
	return nil
}

// createTokens creates the token of a client, and those of boards in a file, one a line.
func (r *relayProc) createTokens(b *bench, o relayOptions) error {
	devices := o.devices
	out, err := output(b.ctx, b.agentctl, "token", "create", "--state-dir", r.state, "--class", cmp.Or(o.class, "agent"), "--ttl", "24h")
	if err != nil {
		return err
	}
	r.token = strings.TrimSpace(out)
	if devices == 0 {
		return nil
	}
	if out, err = output(b.ctx, b.agentctl, "token", "create", "--state-dir", r.state, "--class", "device", "--ttl", "24h", "--count", strconv.Itoa(devices)); err != nil {
		return err
	}
	r.tokens = filepath.Join(r.state, "devices.tokens")
	return os.WriteFile(r.tokens, []byte(out), 0o600)
}

// startFleet links n mock boards and waits until all are ready.
func (b *bench) startFleet(r *relayProc, n int) (*process, error) {
	args := []string{"run", "--mock", strconv.Itoa(n), "--relay", "ws" + strings.TrimPrefix(r.url, "http"), "--token-file", r.tokens,
		"--state-dir", filepath.Join(b.dir, b.newName("fleet"))}
	if r.ca != "" {
		args = append(args, "--ca-file", r.ca)
	}
	p, _, err := start(2*time.Minute, isReady, b.agentctl, args...)
	return p, err
}

// isReady recognises the log line of a daemon that serves.
func isReady(line string) bool { return strings.Contains(line, `"msg":"ready"`) }

// listNodes fills r.nodes with the boards that are online, at least want.
func (r *relayProc) listNodes(want int) error {
	deadline := time.Now().Add(20 * time.Second)
	for {
		ids, err := r.online()
		if err == nil && len(ids) >= want {
			r.nodes = ids
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d of %d boards are online: %w", len(ids), want, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (r *relayProc) online() (ids []string, err error) {
	client := r.client()
	defer client.CloseIdleConnections()
	for after := ""; ; {
		var body struct {
			Nodes []struct {
				NodeID string `json:"node_id"`
				Online bool
			}
			Next string
		}
		if err := r.get(client, "/v1/nodes?limit=5000&after="+after, &body); err != nil {
			return nil, err
		}
		for _, n := range body.Nodes {
			if n.Online {
				ids = append(ids, n.NodeID)
			}
		}
		if after = body.Next; after == "" {
			return ids, nil
		}
	}
}

// client trusts the relay's authority.
func (r *relayProc) client() *http.Client {
	t := &http.Transport{}
	if r.ca != "" {
		if pem, err := os.ReadFile(r.ca); err == nil {
			t.TLSClientConfig = &tls.Config{RootCAs: x509.NewCertPool()}
			t.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem)
		}
	}
	return &http.Client{Timeout: 20 * time.Second, Transport: t}
}

// get decodes the answer to a GET of the agent.
func (r *relayProc) get(client *http.Client, path string, to any) error {
	req, err := http.NewRequest(http.MethodGet, r.url+path, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+r.token)
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, res.Status)
	}
	return json.NewDecoder(res.Body).Decode(to)
}

// collect asks a relay with profiles to collect its garbage and to give free memory back, and
// returns its report about its memory.
func (r *relayProc) collect() (string, error) {
	for len(r.lines) > 0 {
		<-r.lines
	}
	r.signal(syscall.SIGUSR1)
	timeout := time.After(30 * time.Second)
	for {
		select {
		case l, ok := <-r.lines:
			if !ok {
				return "", fmt.Errorf("the relay ended: %s", r.last())
			}
			if strings.HasPrefix(l, gcDoneMarker) {
				return l, nil
			}
		case <-timeout:
			return "", fmt.Errorf("the relay did not collect its garbage")
		}
	}
}

// gcDoneMarker begins the line that such a relay prints after a collection.
const gcDoneMarker = "collected"

// freePort finds a port of loopback for a program that cannot choose one itself.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String(), nil
}
