package doctor

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/config"
	"agentctl/daemon"
	"agentctl/prober"
	"agentctl/transport/link"
)

const day = 24 * time.Hour

var testNow = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

// expect checks a finding: its status, and a word of its message or advice.
func expect(t *testing.T, what string, f Finding, status Status, word string) {
	t.Helper()
	if f.Status != status || !strings.Contains(f.Message+" "+f.Next, word) {
		t.Errorf("%s: got %+v, want %s with %q", what, f, status, word)
	}
	if (f.Status == Warn || f.Status == Fail) && f.Next == "" {
		t.Errorf("%s: %+v does not say what to do", what, f)
	}
}

func TestToken(t *testing.T) {
	token := func(claims string) string {
		return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
	}
	at := func(d time.Duration) int64 { return testNow.Add(d).Unix() }
	tests := []struct {
		name, token string
		status      Status
		word        string
	}{
		{"good", token(fmt.Sprintf(`{"cls":"device_runtime","sub":"n","exp":%d}`, at(60*day))), OK, "60 days"},
		{"soon", token(fmt.Sprintf(`{"cls":"device_runtime","sub":"n","exp":%d}`, at(3*day))), Warn, "before it expires"},
		{"over", token(fmt.Sprintf(`{"cls":"device_runtime","exp":%d}`, at(-time.Hour))), Fail, "expired on 2026-06-01"},
		{"not yet", token(fmt.Sprintf(`{"cls":"device_runtime","nbf":%d,"exp":%d}`, at(day), at(9*day))), Fail, "clock"},
		{"agent", token(fmt.Sprintf(`{"cls":"agent_runtime","exp":%d}`, at(day))), Fail, "--class device"},
		{"endless", token(`{"cls":"device_runtime"}`), Fail, "never expires"},
		{"text", "hello", Fail, "not hold an agentctl token"},
		{"no json", "a.!!.c", Fail, "not hold an agentctl token"},
		{"long", strings.Repeat("a", 5000), Fail, "not hold an agentctl token"},
	}
	for _, tt := range tests {
		expect(t, tt.name, tokenFinding(tt.token, testNow), tt.status, tt.word)
	}

	path := filepath.Join(t.TempDir(), "token")
	p := &target{tokenFile: path}
	expect(t, "no file", p.checkToken(nil, testNow), Fail, "agentctl token create")
	if err := os.WriteFile(path, []byte(tests[0].token), 0o644); err != nil {
		t.Fatal(err)
	}
	expect(t, "open file", p.checkToken(nil, testNow), Warn, "chmod 0600")
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, "file", p.checkToken(nil, testNow), OK, "until 2026-07-31")
	expect(t, "none", (&target{}).checkToken(nil, testNow), Skip, "none is needed")
	expect(t, "forgotten", (&target{relay: "wss://x"}).checkToken(nil, testNow), Fail, "token_file")
}

func TestCertificate(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	certificate := func(from, to time.Time) *x509.Certificate {
		c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "attic CA"}, NotBefore: from, NotAfter: to,
			DNSNames: []string{"relay.example"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
		der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		if c, err = x509.ParseCertificate(der); err != nil {
			t.Fatal(err)
		}
		return c
	}
	good := certificate(testNow.Add(-day), testNow.Add(90*day))
	tests := []struct {
		name   string
		cert   *x509.Certificate
		trust  bool
		host   string
		status Status
		word   string
	}{
		{"good", good, true, "relay.example", OK, "90 days"},
		{"ends soon", certificate(testNow.Add(-day), testNow.Add(5*day)), true, "relay.example", Warn, "renew"},
		{"ended", certificate(testNow.Add(-9*day), testNow.Add(-day)), true, "relay.example", Fail, "expired on 2026-05-31"},
		{"begins", certificate(testNow.Add(day), testNow.Add(9*day)), true, "relay.example", Fail, "clock"},
		{"unknown authority", good, false, "relay.example", Fail, "ca_file"},
		{"other name", good, true, "other.example", Fail, "another name"},
	}
	for _, tt := range tests {
		roots := x509.NewCertPool()
		if tt.trust {
			roots.AddCert(tt.cert)
		}
		expect(t, tt.name, certificateFinding([]*x509.Certificate{tt.cert}, roots, tt.host, testNow), tt.status, tt.word)
	}
}

func TestRelay(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("SSH-2.0-hello\r\n"))
			_ = c.Close()
		}
	}()
	addr := ln.Addr().String()
	last := func(relay string, st *daemon.Status) Finding {
		fs := (&target{relay: relay, relayOrigin: "--relay"}).checkRelay(t.Context(), st)
		return fs[len(fs)-1]
	}
	expect(t, "plain", last("ws://"+addr, nil), Skip, "in the clear")
	expect(t, "no TLS", last("wss://"+addr, nil), Fail, "openssl")
	known := &daemon.Status{}
	known.Link.Relay = "ws://" + addr
	expect(t, "of the daemon", last("", known), Skip, "in the clear")
	_ = ln.Close()
	expect(t, "closed", last("wss://"+addr, nil), Fail, "firewall")
	expect(t, "none", last("", nil), Skip, "works alone")
	expect(t, "nonsense", last("gopher://x", nil), Fail, "correct it in --relay")
}

func TestInstallation(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	p := &target{stateDir: dir, Options: Options{Socket: filepath.Join(dir, "s")}}
	if f := p.checkStateDir(nil); f.Status == Fail { // the disk of the test may be rather full
		t.Errorf("state_dir: %+v", f)
	}
	expect(t, "no directory", (&target{stateDir: dir + "/x"}).checkStateDir(nil), Warn, "agentctl run")
	known := &daemon.Status{}
	known.Storage.Path = filepath.Join(dir, "history.db")
	if err := os.WriteFile(known.Storage.Path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if f := (&target{stateDir: "/nowhere"}).checkStateDir(known); !strings.HasPrefix(f.Message, dir+",") {
		t.Errorf("the daemon's own directory: %+v", f)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if f := p.checkStateDir(nil); f.Status == OK {
		t.Errorf("open to everybody: %+v", f)
	}
	expect(t, "no socket", p.checkSocket(t.Context()), Fail, "agentctl run")
	if err := os.WriteFile(p.Socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, "a file", p.checkSocket(t.Context()), Fail, "not a socket")

	expect(t, "clock of 1970", clockFinding(time.Unix(1000, 0), time.Time{}, true), Fail, "timedatectl")
	expect(t, "clock before the build", clockFinding(testNow, testNow.Add(day), true), Fail, "timedatectl")
	expect(t, "clock alone", clockFinding(testNow, time.Time{}, false), Warn, "not synchronized")
	expect(t, "clock", clockFinding(testNow, testNow.Add(-day), true), OK, "2026-06-01")

	service := func(load, active, sub, file string) Finding {
		return serviceFinding(fmt.Sprintf("LoadState=%s\nActiveState=%s\nSubState=%s\nUnitFileState=%s\nResult=exit-code\nNRestarts=3\n", load, active, sub, file))
	}
	expect(t, "service", service("loaded", "active", "running", "enabled"), OK, "active (running)")
	expect(t, "not at boot", service("loaded", "active", "running", "disabled"), Warn, "systemctl enable")
	expect(t, "stopped", service("loaded", "inactive", "dead", "enabled"), Warn, "enable --now")
	expect(t, "crashing", service("loaded", "activating", "auto-restart", "enabled"), Fail, "journalctl")
	expect(t, "not installed", service("not-found", "inactive", "dead", ""), Skip, "package")
}

func TestDaemonFindings(t *testing.T) {
	of := func(text string) *prober.ModuleReadings {
		var r prober.ModuleReadings
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatal(err)
		}
		return &r
	}
	expect(t, "weak", powerFinding(of(`{"power":{"under_voltage":true,"throttled":true}}`)), Warn, "cable")
	expect(t, "slow", powerFinding(of(`{"power":{"under_voltage":false,"throttled":true}}`)), Warn, "cool")
	expect(t, "strong", powerFinding(of(`{"power":{"under_voltage":false}}`)), OK, "good")
	expect(t, "no report", powerFinding(of(`{}`)), Skip, "does not report")
	expect(t, "hot", heatFinding(of(`{"temperature":{"hottest_c":82}}`)), Warn, "cool")
	expect(t, "warm", heatFinding(of(`{"temperature":{"hottest_c":60}}`)), OK, "60.0 C")
	expect(t, "no sensor", heatFinding(of(`{}`)), Skip, "sensor")
	expect(t, "new", wearFinding(of(`{"wear":{"used_pct":10,"pre_eol":"normal"}}`)), OK, "10 %")
	expect(t, "old", wearFinding(of(`{"wear":{"used_pct":80}}`)), Warn, "soon")
	expect(t, "reserved blocks used up", wearFinding(of(`{"wear":{"pre_eol":"urgent"}}`)), Fail, "now")
	expect(t, "card", wearFinding(of(`{}`)), Skip, "eMMC")

	var s daemon.Status
	s.Version = "v1"
	expect(t, "daemon", daemonFinding(&s, "v1"), OK, "up")
	s.Version = "older"
	expect(t, "other version", daemonFinding(&s, "v1"), Warn, "restart")
	s.Version = "v1"
	s.Config = &daemon.ConfigStatus{}
	s.Config.RestartNeeded = []string{"socket"}
	expect(t, "restart", daemonFinding(&s, "v1"), Warn, "socket")
	s.Config.Error = "config.yaml:1: x"
	expect(t, "bad reload", daemonFinding(&s, "v1"), Fail, "config validate")
	expect(t, "stopped", samplingFinding(&s), Warn, "agentctl start")
	s.Sampling.Running = true
	expect(t, "sampling", samplingFinding(&s), OK, "every")
	s.Sampling.ModuleStates = []prober.ModuleState{{Name: "wear", State: "absent"}, {Name: "power", State: "hung"}}
	expect(t, "hung module", samplingFinding(&s), Warn, "power is hung")
	s.Sampling.LastError = "no /proc"
	expect(t, "no sample", samplingFinding(&s), Fail, "no /proc")
	for state, want := range map[string]Status{"off": Skip, "ok": OK, "degraded:storage": Fail} {
		s.Storage.State = state
		expect(t, state, storageFinding(&s), want, "")
	}
	for state, want := range map[link.State]Status{"disabled": Skip, "ready": OK, "connecting": Warn, "refused": Fail, "tls_untrusted": Fail} {
		s.Link.State = state
		expect(t, string(state), linkFinding(&s), want, "")
	}
	s.CloneSuspected = true
	s = daemon.Status{Link: daemon.LinkStatus{State: link.StateWaiting, LastError: &daemon.LinkError{Code: 4503, Message: "link closed: 4503 clock"}}}
	expect(t, "relay's clock", linkFinding(&s), Fail, "relay's log")
	s = daemon.Status{CloneSuspected: true}
	expect(t, "clone", linkFinding(&s), Fail, "token for each board")
}

// TestCheckHangs checks that a check that hangs fails under its names, and delays no other.
func TestCheckHangs(t *testing.T) { synctest.Test(t, checkHangs) }

func checkHangs(t *testing.T) {
	const timeout = 10 * time.Second // virtual
	never := make(chan struct{})
	defer close(never)
	start := time.Now()
	d := runChecks(t.Context(), []check{
		{[]string{"mount", "twin"}, func(context.Context) []Finding { <-never; return nil }},
		{[]string{"slow"}, func(ctx context.Context) []Finding {
			<-ctx.Done()
			return []Finding{{"slow", Warn, "timed out", "wait"}}
		}},
		{[]string{"good"}, func(context.Context) []Finding { return []Finding{{"good", OK, "", ""}} }},
	}, timeout)
	if d := time.Since(start); d < timeout || d > 2*timeout {
		t.Errorf("it took %v", d)
	}
	want := &Report{Failures: 2, Warnings: 1, Checks: []Finding{
		{"mount", Fail, "no answer in time", "see the kernel's log for a device or mount that hangs: dmesg"},
		{"twin", Fail, "no answer in time", "see the kernel's log for a device or mount that hangs: dmesg"},
		{"slow", Warn, "timed out", "wait"},
		{"good", OK, "", ""},
	}}
	if !reflect.DeepEqual(d, want) {
		t.Errorf("got %+v, want %+v", d, want)
	}
}

// The daemon examines itself from its own status; what needs a person comes first, and what hangs is
// named.
func TestInside(t *testing.T) {
	dir := t.TempDir()
	source := config.Source{Path: filepath.Join(dir, "config.yaml"), LookupEnv: func(string) (string, bool) { return "", false },
		Flags: config.Settings{"state_dir": config.Setting{Value: filepath.Join(dir, "missing")}}}
	cfg, err := source.Load()
	if err != nil {
		t.Fatal(err)
	}
	s := &daemon.Status{Version: "1.2.3"}
	s.Sampling.Running = true
	s.Link.State = link.StateDisabled
	s.Storage.State = "off"
	hot := &prober.ModuleReadings{Temperature: &prober.Temperature{HottestC: 85}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	i := new(Inside)
	r, unfinished := i.Examine(ctx, "1.2.3", time.Time{}, cfg, s, hot)
	names := make(map[string]Status)
	for n, f := range r.Checks {
		names[f.Name] = f.Status
		if n > 0 && rank(r.Checks[n-1].Status) > rank(f.Status) {
			t.Errorf("%s comes before %+v", r.Checks[n-1].Status, f)
		}
	}
	if len(unfinished) != 0 || names["temperature"] != Warn || names["state_dir"] != Warn || names["link"] != Skip || names["token"] != Skip || len(names) != 11 {
		t.Errorf("got %v, unfinished %v", names, unfinished)
	}
	if r.Warnings < 2 || r.Failures != 0 {
		t.Errorf("%d warnings, %d failures", r.Warnings, r.Failures)
	}
	// Two earlier runs hang at the token.
	i = &Inside{running: map[string]int{"token": maxRunning}}
	if r, unfinished := i.Examine(ctx, "1.2.3", time.Time{}, cfg, s, hot); !reflect.DeepEqual(unfinished, []string{"token"}) || len(r.Checks) != 10 {
		t.Errorf("%d checks, unfinished %v", len(r.Checks), unfinished)
	}
}
