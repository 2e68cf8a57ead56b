//go:build linux

package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"agentctl/relay/gateway"
)

// The servers of the event comparison. Each starts anew for each round, on the servers' core.

const sampleData = `{"ts_ms":1234567890123,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy","cpu_pct":12.4,"mem_bytes":1234567890,"mem_total_bytes":8589934592,` +
	`"disk_pct":31.2,"load_1m":0.42,"load_5m":0.39,"load_15m":0.35}`

// newName is a name in the run's directory that nothing has yet.
func (b *bench) newName(prefix string) string {
	b.names++
	return prefix + "-" + strconv.Itoa(b.names)
}

// post is the publishing of sampleData by one POST for each event.
func post(addr, path, header, body string) protocol {
	request := []byte("POST " + path + " HTTP/1.1\r\nHost: " + addr + "\r\n" + header + "Content-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body)
	return plainHTTP(addr, func(b []byte, _ string, _ int) []byte { return append(b, request...) })
}

func subscribeGet(addr, path string) [][]byte {
	return [][]byte{[]byte("GET " + path + " HTTP/1.1\r\nHost: " + addr + "\r\nAccept: text/event-stream\r\n\r\n")}
}

const jsonHeader = "Content-Type: application/json\r\n"

// gatewayEvent publishes and subscribes as the gateway does; the naive loop understands it too.
func gatewayEvent(name string, p *process, addr string, stop func()) *fanoutServer {
	return &fanoutServer{name: name, server: p, addr: addr, stop: stop,
		subscribe: subscribeGet(addr, gateway.StreamPath+"?topics="+eventsTopic), started: []byte(": stream start"), mark: []byte("\nid: "),
		publish: post(addr, gateway.IngestPath, jsonHeader, `{"topic":"`+eventsTopic+`","data":`+sampleData+`}`)}
}

func (b *bench) naiveServer(kind string) (*fanoutServer, error) {
	p, addr, err := startOnServerCore(10*time.Second, isAddress, b.self, "serve", kind)
	if err != nil {
		return nil, err
	}
	f := gatewayEvent("naive loop", p, addr, p.stop)
	if kind == "naive-metrics" {
		f.mark = []byte("event: metric")
	}
	return f, nil
}

// gatewayServer is the product's gateway, signing, with its log on the disk.
func (b *bench) gatewayServer() (*fanoutServer, error) {
	dir := filepath.Join(b.dir, b.newName("gateway"))
	p, line, err := startOnServerCore(10*time.Second, func(l string) bool { return strings.HasPrefix(l, "{") && strings.Contains(l, `"ready":true`) },
		"env", "MCP_SSE_HMAC_SECRET=a secret of the bench", b.agentctl, "events", "serve", "--listen", "127.0.0.1:0", "--state-dir", dir)
	if err != nil {
		return nil, err
	}
	var ready struct {
		URL string `json:"sse_url"`
	}
	if err := json.Unmarshal([]byte(line), &ready); err != nil {
		p.stop()
		return nil, err
	}
	u, err := url.Parse(ready.URL)
	if err != nil {
		p.stop()
		return nil, err
	}
	return gatewayEvent("gateway", p, u.Host, p.stop), nil
}

// nchanModule is where Debian's libnginx-mod-nchan has it.
const nchanModule = "/usr/lib/nginx/modules/ngx_nchan_module.so"

// nchanServer is nginx with nchan, as its documentation sets up an EventSource channel.
func (b *bench) nchanServer() (*fanoutServer, error) {
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		nginx = "/usr/sbin/nginx"
	}
	if _, err := os.Stat(nchanModule); err != nil {
		return nil, fmt.Errorf("install Debian's nginx-light and libnginx-mod-nchan: %w", err)
	}
	addr, err := freePort()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(b.dir, b.newName("nchan"))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	config := fmt.Sprintf(`load_module %s;
daemon off;
master_process off; # one process, whose CPU is read
worker_rlimit_nofile 20000;
error_log stderr notice;
pid %s/nginx.pid;
events { worker_connections 16000; }
http {
  access_log off;
  keepalive_requests 10000000;
  client_body_temp_path %[2]s; proxy_temp_path %[2]s; fastcgi_temp_path %[2]s; uwsgi_temp_path %[2]s; scgi_temp_path %[2]s;
  server {
    listen %s;
    location = /sub { nchan_subscriber eventsource; nchan_channel_id bench; nchan_subscriber_first_message newest; }
    location = /pub { nchan_publisher; nchan_channel_id bench; nchan_message_buffer_length 500; nchan_message_timeout 1h; }
  }
}
`, nchanModule, dir, addr)
	file := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	p, _, err := startOnServerCore(10*time.Second, func(l string) bool { return strings.Contains(l, "event method") }, nginx, "-p", dir, "-e", "stderr", "-c", file)
	if err != nil {
		return nil, err
	}
	f := &fanoutServer{name: "nchan", server: p, addr: addr, stop: p.stop, subscribe: subscribeGet(addr, "/sub"),
		started: headEnd, mark: []byte("\nid: "), publish: post(addr, "/pub", jsonHeader, sampleData)}
	return f, awaitListener(f)
}

// mercureServer is the standalone Mercure hub with its documented default transport, a history in a file.
func (b *bench) mercureServer() (*fanoutServer, error) {
	if _, err := os.Stat(b.mercure); err != nil {
		return nil, fmt.Errorf("give -mercure: %w", err)
	}
	addr, err := freePort()
	if err != nil {
		return nil, err
	}
	const key = "a secret of the bench, of 32 bytes or more"
	p, _, err := startOnServerCore(10*time.Second, func(l string) bool { return strings.Contains(l, "Mercure started") }, b.mercure,
		"--addr", addr, "--jwt-key", key, "--allow-anonymous", "--write-timeout", "0s", "--heartbeat-interval", "40s",
		"--transport-url", "bolt://"+filepath.Join(b.dir, b.newName("mercure"))+"?size=500")
	if err != nil {
		return nil, err
	}
	body := url.Values{"topic": {"https://example.com/bench"}, "data": {sampleData}}.Encode()
	f := &fanoutServer{name: "Mercure", server: p, addr: addr, stop: p.stop, subscribe: subscribeGet(addr, "/.well-known/mercure?topic=https://example.com/bench"),
		started: headEnd, mark: []byte("id: urn"),
		publish: post(addr, "/.well-known/mercure", "Content-Type: application/x-www-form-urlencoded\r\nAuthorization: Bearer "+publisherToken(key)+"\r\n", body)}
	return f, awaitListener(f)
}

// publisherToken is the JWT with which a publisher of Mercure may publish everything.
func publisherToken(key string) string {
	encode := base64.RawURLEncoding.EncodeToString
	text := encode([]byte(`{"alg":"HS256","typ":"JWT"}`)) + "." + encode([]byte(`{"mercure":{"publish":["*"]}}`))
	mac := hmac.New(sha256.New, []byte(key))
	mac.Write([]byte(text))
	return text + "." + encode(mac.Sum(nil))
}

// awaitListener waits until a server that says too early that it is ready takes connections.
func awaitListener(f *fanoutServer) error {
	var err error
	for range 100 {
		var fd int
		if fd, err = dialFD(f.addr); err == nil {
			closeFD(fd)
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	err = errors.Join(err, fmt.Errorf("%s says: %s", f.name, f.server.last()))
	f.stop()
	return err
}
