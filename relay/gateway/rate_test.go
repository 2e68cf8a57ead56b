package gateway

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// TestLargeEventsCostMore: an identity's rate bounds its bytes too.
func TestLargeEventsCostMore(t *testing.T) {
	who := authFunc(func(*http.Request) (Identity, error) {
		return Identity{Tenant: "t", Subject: "s", Scopes: scopes{ScopeIngest}}, nil
	})
	post := func(g *testGateway, size int) (status int) {
		status, _, _ = g.request("POST", IngestPath, fmt.Sprintf(`{"topic":"a","data":%q}`, strings.Repeat("x", size)), "Authorization", "Bearer x")
		return status
	}
	for _, tt := range []struct{ size, least, most int }{{100, 100, 100}, {60_000, 14, 60}} { // a bucket of 200, 15 each
		g := start(t, Options{Identities: who, IngestRate: 100})
		taken := 0
		for taken < 100 && post(g, tt.size) == http.StatusAccepted {
			taken++
		}
		if taken < tt.least || taken > tt.most {
			t.Errorf("%d events of %d bytes were taken at once", taken, tt.size)
		}
	}
}
