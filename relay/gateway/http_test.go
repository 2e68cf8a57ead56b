package gateway

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

func TestIngestErrors(t *testing.T) {
	g := start(t, Options{Ring: 5})
	s := g.open("")
	big := strings.Repeat("x", MaxData)
	tests := []struct {
		name, body string
		want       int
	}{
		{"malformed", `{"topic":"a","data":`, 400},
		{"two documents", `{"topic":"a","data":1}{}`, 400},
		{"empty", ``, 400},
		{"no object", `[]`, 400},
		{"missing topic", `{"data":1}`, 400},
		{"topic is no string", `{"topic":1,"data":1}`, 400},
		{"unknown key", `{"topic":"a","data":1,"id":7}`, 400},
		{"other case", `{"Topic":"a","data":1}`, 400},
		{"key twice", `{"topic":"a","topic":"b","data":1}`, 400},
		{"key twice within", `{"topic":"a","data":{"k":1,"k":2}}`, 400},
		{"bad UTF-8", "{\"topic\":\"a\",\"data\":\"\xff\"}", 400},
		{"too deep", `{"topic":"a","data":` + strings.Repeat("[", 20) + strings.Repeat("]", 20) + `}`, 400},
		{"line break in the topic", `{"topic":"a\nid: 1","data":1}`, 400},
		{"CR in the topic", `{"topic":"a\r","data":1}`, 400},
		{"leading dot", `{"topic":".a","data":1}`, 400},
		{"blank", `{"topic":"a b","data":1}`, 400},
		{"long topic", `{"topic":"` + strings.Repeat("a", 129) + `","data":1}`, 400},
		{"heartbeat", `{"topic":"heartbeat","data":1}`, 400},
		{"reset", `{"topic":"gateway/reset","data":1}`, 400},
		{"large data", `{"topic":"a","data":"` + big + `"}`, 413},
		{"large body", `{"topic":"a","data":"` + big + big + `"}`, 413},
	}
	for _, tt := range tests {
		status, h, body := g.request("POST", IngestPath, tt.body)
		var out struct {
			Error struct {
				Code, Message string
				TraceID       string `json:"trace_id"`
			}
		}
		if err := json.Unmarshal([]byte(body), &out); status != tt.want || err != nil || out.Error.Code != "E_BAD_REQUEST" ||
			out.Error.Message == "" || len(out.Error.TraceID) != 32 || h.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %s, want %d", tt.name, status, body, tt.want)
		}
	}
	if st := g.Stats(); st.Ingested != 0 {
		t.Errorf("%d events were ingested", st.Ingested)
	}
	// What is good arrives as it is, on one line; as much as fits, too.
	g.post("A_1/b.c-d", "{ \"a\" :\r\n [ 1.0 , \"\\r\\n\\ndata: x\\n\\nid: 5\", null ] }")
	g.post("a", `"`+big[2:]+`"`)
	status, _, _ := g.request("POST", IngestPath, `{"topic":"nothing"}`) // JSON.stringify leaves undefined out
	if status != 202 {
		t.Error(status)
	}
	s.want("A_1/b.c-d", `{"a":[1.0,"\r\n\ndata: x\n\nid: 5",null]}`, "a", `"`+big[2:]+`"`, "nothing", "null")
}

func TestSignature(t *testing.T) {
	secret := "a secret"
	g := start(t, Options{HMACSecret: []byte(secret)})
	s := g.open("")
	before := time.Now().UnixMilli()
	id := g.post("log/level", `{"a": 1}`)
	ev := s.next()
	data, line, ok := strings.Cut(string(ev.Data), "\n")
	var sig struct {
		Sig, D string
		TS     int64
	}
	if err := json.Unmarshal([]byte(line), &sig); !ok || err != nil || data != `{"a":1}` || sig.TS < before || sig.TS > time.Now().UnixMilli() {
		t.Fatalf("%s", ev.Data)
	}
	d := sha256.Sum256([]byte(data))
	mac := hmac.New(sha256.New, []byte(secret))
	fmt.Fprintf(mac, "log/level\n%d\n%d\n%x", id, sig.TS, d)
	if want := hex.EncodeToString(mac.Sum(nil)); sig.Sig != want || sig.D != hex.EncodeToString(d[:]) {
		t.Errorf("signed %s over %s, want %s over %x", sig.Sig, sig.D, want, d)
	}
	if !strings.HasPrefix(line, `{"sig":"`) {
		t.Errorf("line %s", line)
	}
}

func TestRoutes(t *testing.T) {
	g := start(t, Options{AllowOrigins: []string{"https://app.example"}})
	host := strings.TrimPrefix(g.url, "http://")
	tests := []struct {
		method, path string
		header       []string
		want         int
	}{
		{"GET", "/", nil, 404},
		{"GET", "/sse", nil, 404},
		{"GET", StreamPath + "/", nil, 404},
		{"GET", "/metrics", nil, 404},
		{"POST", StreamPath, nil, 405},
		{"GET", IngestPath, nil, 405},
		{"GET", TicketPath, nil, 405},
		{"DELETE", MetricsPath, nil, 405},
		{"GET", "/healthz", nil, 200},
		{"GET", "/readyz", nil, 200},
		{"GET", MetricsPath, nil, 200},
		{"HEAD", StreamPath, nil, 200},
		{"HEAD", StreamPath, []string{"Host", "evil.example"}, 403},
		{"HEAD", StreamPath, []string{"Host", "localhost:1"}, 200},
		{"HEAD", StreamPath, []string{"Host", "[::1]:1"}, 200},
		{"HEAD", StreamPath, []string{"Origin", "https://evil.example"}, 403},
		{"HEAD", StreamPath, []string{"Origin", "null"}, 403},
		{"HEAD", StreamPath, []string{"Origin", "https://app.example"}, 200},
		{"HEAD", StreamPath, []string{"Origin", "http://" + host}, 200},
		{"POST", IngestPath, []string{"Origin", "https://evil.example"}, 403},
		{"OPTIONS", IngestPath, []string{"Origin", "https://app.example", "Access-Control-Request-Method", "POST"}, 204},
		{"OPTIONS", IngestPath, []string{"Origin", "https://evil.example", "Access-Control-Request-Method", "POST"}, 403},
		{"OPTIONS", IngestPath, nil, 405},
	}
	for _, tt := range tests {
		status, h, body := g.request(tt.method, tt.path, "", tt.header...)
		if status != tt.want {
			t.Errorf("%s %s %v: %d %s, want %d", tt.method, tt.path, tt.header, status, body, tt.want)
		}
		allowed := h.Get("Access-Control-Allow-Origin")
		if want := len(tt.header) > 1 && tt.header[1] == "https://app.example"; (allowed == "https://app.example") != want {
			t.Errorf("%s %s %v: allows %q", tt.method, tt.path, tt.header, allowed)
		}
		if (status == 405) != (h.Get("Allow") != "") {
			t.Errorf("%s %s: Allow %q", tt.method, tt.path, h.Get("Allow"))
		}
	}
	res, err := http.Get(g.url + StreamPath)
	if err != nil {
		t.Fatal(err)
	}
	if err := res.Body.Close(); err != nil || res.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("%v %v", res.Header, err)
	}
}

// TestMetricsGuard: the metrics of a gateway with tokens take none, so that Host is checked on
// loopback, as Origin is.
func TestMetricsGuard(t *testing.T) {
	g := start(t, Options{SubscribeToken: "secret", Hosts: []string{"events.example"}})
	for _, tt := range []struct {
		path, header, value string
		want                int
	}{
		{MetricsPath, "Host", "evil.example", 403},
		{MetricsPath, "Origin", "https://evil.example", 403},
		{MetricsPath, "Host", "events.example", 200},
		{"/healthz", "Host", "evil.example", 200}, // says nothing
		{StreamPath, "Host", "evil.example", 401}, // the token protects it
	} {
		if status, _, body := g.request("GET", tt.path, "", tt.header, tt.value); status != tt.want {
			t.Errorf("%s %s: %s: %d %s, want %d", tt.path, tt.header, tt.value, status, body, tt.want)
		}
	}
}

// TestMetrics: the six names, their types and help, as a Prometheus reads them.
func TestMetrics(t *testing.T) {
	g := start(t, Options{})
	s := g.open("")
	g.post("a", "1")
	s.want("a", "1")
	res, err := http.Get(g.url + MetricsPath)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	p := expfmt.NewTextParser(model.LegacyValidation)
	got, err := p.TextToMetricFamilies(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{"mcp_sse_clients": 1, "mcp_sse_total_connections": 1, "mcp_sse_events_ingested": 1,
		"mcp_sse_events_delivered": 1, "mcp_sse_events_dropped": 0, "mcp_sse_bytes_sent": float64(len(s.first)+1) + float64(len(fmt.Sprintf("id: %s\nevent: a\ndata: 1\n\n", s.read.LastEventID())))}
	if len(got) != len(want) {
		t.Errorf("%d families", len(got))
	}
	for name, v := range want {
		f := got[name]
		if f == nil || f.GetHelp() == "" || len(f.Metric) != 1 || len(f.Metric[0].Label) != 0 {
			t.Errorf("%s: %v", name, f)
			continue
		}
		value, kind := f.Metric[0].GetCounter().GetValue(), "COUNTER"
		if name == "mcp_sse_clients" {
			value, kind = f.Metric[0].GetGauge().GetValue(), "GAUGE"
		}
		if value != v || f.GetType().String() != kind {
			t.Errorf("%s is %v %v, want %v", name, f.GetType(), value, v)
		}
	}
}

func TestFromEnv(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "token")
	if err := os.WriteFile(file, []byte("from-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	from := func(pairs ...string) (Env, error) {
		m := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = pairs[i+1]
		}
		return FromEnv(func(k string) string { return m[k] })
	}
	e, err := from()
	if err != nil || e.Listen != ":39300" || e.Heartbeat != 15*time.Second || e.Ring != 500 || e.SubscribeToken != "" || e.HMACSecret != nil ||
		e.Include || e.IngestURL != "http://127.0.0.1:39300"+IngestPath {
		t.Errorf("defaults: %+v %v", e, err)
	}
	e, err = from("MCP_SSE_PORT", "40000", "MCP_SSE_HEARTBEAT_MS", "200", "MCP_SSE_RING_MAX", "10", "MCP_SSE_AUTH_TOKEN_FILE", file, "MCP_SSE_INGEST_TOKEN", "i",
		hmacSecretAlias, "secret", "MCP_INCLUDE_SSE", "1", "MCP_SSE_ALLOW_ORIGINS", "https://a.example, http://b:1/", "MCP_SSE_INGEST_URL", "http://h:1/x", "MCP_SSE_HOST", "::1")
	if err != nil || e.Listen != "[::1]:40000" || e.Heartbeat != 200*time.Millisecond || e.Ring != 10 || e.SubscribeToken != "from-file" || e.IngestToken != "i" ||
		string(e.HMACSecret) != "secret" || !e.Include || fmt.Sprint(e.AllowOrigins) != "[https://a.example http://b:1]" || e.IngestURL != "http://h:1/x" {
		t.Errorf("all: %+v %v", e, err)
	}
	for _, bad := range [][]string{
		{"MCP_SSE_PORT", "x"}, {"MCP_SSE_PORT", "65536"}, {"MCP_SSE_PORT", "-1"}, {"MCP_SSE_PORT", " 1"}, {"MCP_SSE_HEARTBEAT_MS", "0"}, {"MCP_SSE_HEARTBEAT_MS", "1.5"},
		{"MCP_SSE_RING_MAX", "0"}, {"MCP_SSE_RING_MAX", "1000000"}, {"MCP_SSE_AUTH_TOKEN", "se cret"}, {"MCP_SSE_AUTH_TOKEN_FILE", filepath.Join(dir, "none")},
		{"MCP_SSE_AUTH_TOKEN", "a", "MCP_SSE_AUTH_TOKEN_FILE", file}, {"MCP_SSE_HMAC_SECRET", "a", hmacSecretAlias, "b"}, {"MCP_INCLUDE_SSE", "perhaps"},
		{"MCP_SSE_ALLOW_ORIGINS", "*"}, {"MCP_SSE_ALLOW_ORIGINS", "app.example"}, {"MCP_SSE_ALLOW_ORIGINS", "https://a/b"}, {"MCP_SSE_INGEST_URL", "h:1"},
	} {
		if _, err := from(bad...); err == nil || !strings.Contains(err.Error(), strings.TrimSuffix(bad[0], "_FILE")) {
			t.Errorf("%v: %v", bad, err)
		} else if strings.Contains(err.Error(), "se cret") {
			t.Errorf("the error shows the token: %v", err)
		}
	}
	if e, err := from("MCP_SSE_HMAC_SECRET", "a", hmacSecretAlias, "a"); err != nil || string(e.HMACSecret) != "a" {
		t.Errorf("the same twice: %v", err)
	}
}
