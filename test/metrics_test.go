package test

import (
	"io"
	"net/http"
	"testing"

	"agentctl/relay"
)

func withMetrics(o *relay.Options) { o.MetricsListen = "127.0.0.1:0" }

func metricsText(t testing.TB, r *rig) string {
	t.Helper()
	resp, err := http.Get(r.relay.MetricsURL())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
