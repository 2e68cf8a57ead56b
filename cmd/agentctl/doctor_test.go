package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/prober"
	"agentctl/term"
)

var doctorNow = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

// expect checks a finding: its status, and a word of its message or advice.
func expect(t *testing.T, what string, f finding, status, word string) {
	t.Helper()
	if f.Status != status || !strings.Contains(f.Message+" "+f.Next, word) {
		t.Errorf("%s: got %+v, want %s with %q", what, f, status, word)
	}
	if (f.Status == findWarn || f.Status == findFail) && f.Next == "" {
		t.Errorf("%s: %+v does not say what to do", what, f)
	}
}

func TestDoctorToken(t *testing.T) {
	token := func(claims string) string {
		return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
	}
	at := func(d time.Duration) int64 { return doctorNow.Add(d).Unix() }
	tests := []struct{ name, token, status, word string }{
		{"good", token(fmt.Sprintf(`{"cls":"device_runtime","sub":"n","exp":%d}`, at(60*day))), findOK, "60 days"},
		{"soon", token(fmt.Sprintf(`{"cls":"device_runtime","sub":"n","exp":%d}`, at(3*day))), findWarn, "before it ends"},
		{"over", token(fmt.Sprintf(`{"cls":"device_runtime","exp":%d}`, at(-time.Hour))), findFail, "ended on 2026-06-01"},
		{"not yet", token(fmt.Sprintf(`{"cls":"device_runtime","nbf":%d,"exp":%d}`, at(day), at(9*day))), findFail, "clock"},
		{"agent", token(fmt.Sprintf(`{"cls":"agent_runtime","exp":%d}`, at(day))), findFail, "--class device"},
		{"endless", token(`{"cls":"device_runtime"}`), findFail, "no end"},
		{"text", "hello", findFail, "no agentctl token"},
		{"no json", "a.!!.c", findFail, "no agentctl token"},
		{"long", strings.Repeat("a", 5000), findFail, "no agentctl token"},
	}
	for _, tt := range tests {
		expect(t, tt.name, tokenFinding(tt.token, doctorNow), tt.status, tt.word)
	}

	path := filepath.Join(t.TempDir(), "token")
	p := &patient{tokenFile: path}
	expect(t, "no file", p.checkToken(nil, doctorNow), findFail, "agentctl token create")
	if err := os.WriteFile(path, []byte(tests[0].token), 0o644); err != nil {
		t.Fatal(err)
	}
	expect(t, "open file", p.checkToken(nil, doctorNow), findWarn, "chmod 0600")
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, "file", p.checkToken(nil, doctorNow), findOK, "until 2026-07-31")
	expect(t, "none", (&patient{}).checkToken(nil, doctorNow), findSkip, "none is needed")
	expect(t, "forgotten", (&patient{relay: "wss://x"}).checkToken(nil, doctorNow), findFail, "--token-file")
}

func TestDoctorCertificate(t *testing.T) {
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
	good := certificate(doctorNow.Add(-day), doctorNow.Add(90*day))
	tests := []struct {
		name         string
		cert         *x509.Certificate
		trust        bool
		host         string
		status, word string
	}{
		{"good", good, true, "relay.example", findOK, "90 days"},
		{"ends soon", certificate(doctorNow.Add(-day), doctorNow.Add(5*day)), true, "relay.example", findWarn, "renew"},
		{"ended", certificate(doctorNow.Add(-9*day), doctorNow.Add(-day)), true, "relay.example", findFail, "ended on 2026-05-31"},
		{"begins", certificate(doctorNow.Add(day), doctorNow.Add(9*day)), true, "relay.example", findFail, "clock"},
		{"stranger", good, false, "relay.example", findFail, "--ca-file"},
		{"other name", good, true, "other.example", findFail, "another name"},
	}
	for _, tt := range tests {
		roots := x509.NewCertPool()
		if tt.trust {
			roots.AddCert(tt.cert)
		}
		expect(t, tt.name, certificateFinding([]*x509.Certificate{tt.cert}, roots, tt.host, doctorNow), tt.status, tt.word)
	}
}

func TestDoctorRelay(t *testing.T) {
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
	last := func(relay string, st *boxStatus) finding {
		fs := (&patient{relay: relay, relayFrom: "--relay"}).checkRelay(t.Context(), st)
		return fs[len(fs)-1]
	}
	expect(t, "plain", last("ws://"+addr, nil), findSkip, "in the clear")
	expect(t, "no TLS", last("wss://"+addr, nil), findFail, "openssl")
	known := &boxStatus{}
	known.Link.Relay = "ws://" + addr
	expect(t, "of the daemon", last("", known), findSkip, "in the clear")
	_ = ln.Close()
	expect(t, "closed", last("wss://"+addr, nil), findFail, "firewall")
	expect(t, "none", last("", nil), findSkip, "works alone")
	expect(t, "nonsense", last("gopher://x", nil), findFail, "correct it in --relay")
}

func TestDoctorBox(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	p := &patient{stateDir: dir, socket: filepath.Join(dir, "s")}
	if f := p.checkStateDir(nil); f.Status == findFail { // the disk of the test may be rather full
		t.Errorf("state_dir: %+v", f)
	}
	expect(t, "no directory", (&patient{stateDir: dir + "/x"}).checkStateDir(nil), findWarn, "agentctl run")
	known := &boxStatus{}
	known.Storage.Path = filepath.Join(dir, "history.db")
	if err := os.WriteFile(known.Storage.Path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if f := (&patient{stateDir: "/nowhere"}).checkStateDir(known); !strings.HasPrefix(f.Message, dir+",") {
		t.Errorf("the daemon's own directory: %+v", f)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if f := p.checkStateDir(nil); f.Status == findOK {
		t.Errorf("open to everybody: %+v", f)
	}
	expect(t, "no socket", p.checkSocket(t.Context()), findFail, "agentctl run")
	if err := os.WriteFile(p.socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, "a file", p.checkSocket(t.Context()), findFail, "no socket")

	expect(t, "clock of 1970", clockFinding(time.Unix(1000, 0), time.Time{}, true), findFail, "timedatectl")
	expect(t, "clock before the build", clockFinding(doctorNow, doctorNow.Add(day), true), findFail, "timedatectl")
	expect(t, "clock alone", clockFinding(doctorNow, time.Time{}, false), findWarn, "not synchronised")
	expect(t, "clock", clockFinding(doctorNow, doctorNow.Add(-day), true), findOK, "2026-06-01")

	service := func(load, active, sub, file string) finding {
		return serviceFinding(fmt.Sprintf("LoadState=%s\nActiveState=%s\nSubState=%s\nUnitFileState=%s\nResult=exit-code\nNRestarts=3\n", load, active, sub, file))
	}
	expect(t, "service", service("loaded", "active", "running", "enabled"), findOK, "active (running)")
	expect(t, "not at boot", service("loaded", "active", "running", "disabled"), findWarn, "systemctl enable")
	expect(t, "stopped", service("loaded", "inactive", "dead", "enabled"), findWarn, "enable --now")
	expect(t, "crashing", service("loaded", "activating", "auto-restart", "enabled"), findFail, "journalctl")
	expect(t, "not installed", service("not-found", "inactive", "dead", ""), findSkip, "package")
}

func TestDoctorMachine(t *testing.T) {
	of := func(json string) reading {
		r, err := parseReading([]byte(json))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	expect(t, "weak", powerFinding(of(`{"power":{"under_voltage":true,"throttled":true}}`)), findWarn, "cable")
	expect(t, "slow", powerFinding(of(`{"power":{"under_voltage":false,"throttled":true}}`)), findWarn, "cool")
	expect(t, "strong", powerFinding(of(`{"power":{"under_voltage":false}}`)), findOK, "good")
	expect(t, "dumb", powerFinding(of(`{}`)), findSkip, "does not tell")
	expect(t, "hot", heatFinding(of(`{"temperature":{"hottest_c":82}}`)), findWarn, "cool")
	expect(t, "warm", heatFinding(of(`{"temperature":{"hottest_c":60}}`)), findOK, "60.0 C")
	expect(t, "blind", heatFinding(of(`{}`)), findSkip, "sensor")
	expect(t, "new", wearFinding(of(`{"wear":{"used_pct":10,"pre_eol":"normal"}}`)), findOK, "10 %")
	expect(t, "old", wearFinding(of(`{"wear":{"used_pct":80}}`)), findWarn, "soon")
	expect(t, "dying", wearFinding(of(`{"wear":{"pre_eol":"urgent"}}`)), findFail, "now")
	expect(t, "card", wearFinding(of(`{}`)), findSkip, "eMMC")

	var s boxStatus
	s.Version = version
	expect(t, "daemon", daemonFinding(&s), findOK, "up")
	s.Version = "older"
	expect(t, "other version", daemonFinding(&s), findWarn, "restart")
	s.Version = version
	s.Config.RestartNeeded = []string{"socket"}
	expect(t, "restart", daemonFinding(&s), findWarn, "socket")
	s.Config.Error = "config.yaml:1: x"
	expect(t, "bad reload", daemonFinding(&s), findFail, "config validate")
	expect(t, "stopped", samplingFinding(&s), findWarn, "agentctl start")
	s.Sampling.Running = true
	expect(t, "sampling", samplingFinding(&s), findOK, "every")
	s.Sampling.ModuleStates = []prober.ModuleState{{Name: "wear", State: "absent"}, {Name: "power", State: "hung"}}
	expect(t, "hung module", samplingFinding(&s), findWarn, "power is hung")
	s.Sampling.LastError = "no /proc"
	expect(t, "no sample", samplingFinding(&s), findFail, "no /proc")
	for state, want := range map[string]string{"off": findSkip, "ok": findOK, "degraded:storage": findFail} {
		s.Storage.State = state
		expect(t, state, storageFinding(&s), want, "")
	}
	for state, want := range map[string]string{"disabled": findSkip, "ready": findOK, "connecting": findWarn, "refused": findFail, "tls_untrusted": findFail} {
		s.Link.State = state
		expect(t, state, linkFinding(&s), want, "")
	}
	s.CloneSuspected = true
	expect(t, "clone", linkFinding(&s), findFail, "token for each board")
}

// A check that hangs holds nobody up; its names are reported.
func TestDoctorHangs(t *testing.T) {
	never := make(chan struct{})
	t.Cleanup(func() { close(never) })
	start := time.Now()
	d := diagnose(t.Context(), []check{
		{[]string{"mount", "twin"}, func(context.Context) []finding { <-never; return nil }},
		{[]string{"slow"}, func(ctx context.Context) []finding {
			<-ctx.Done()
			return []finding{{"slow", findWarn, "timed out", "wait"}}
		}},
		{[]string{"good"}, func(context.Context) []finding { return []finding{{"good", findOK, "", ""}} }},
	}, 50*time.Millisecond)
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("it took %v", d)
	}
	var b strings.Builder
	if err := d.write(&b); err != nil {
		t.Fatal(err)
	}
	want := `fail  mount       no answer in time
                  -> see the kernel's log for a device or mount that hangs: dmesg
fail  twin        no answer in time
                  -> see the kernel's log for a device or mount that hangs: dmesg
warn  slow        timed out
                  -> wait
ok    good        
2 failures, 1 warning
`
	if b.String() != want || d.Failures != 2 || d.Warnings != 1 {
		t.Errorf("got\n%s", b.String())
	}
}

func TestWrapText(t *testing.T) {
	for in, want := range map[string]string{"": "", "a": "a", "one two three": "one two|three", "incomprehensible a b": "incomprehensible|a b"} {
		if got := strings.Join(term.Wrap(in, 8), "|"); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
