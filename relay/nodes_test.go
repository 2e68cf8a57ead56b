package relay

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/manifest"
	"agentctl/relay/audit"
	"agentctl/relay/auth"
)

// adminTest is a relay whose routes are called without a network.
type adminTest struct {
	*testing.T
	r      *Relay
	routes http.Handler // of r
}

func newAdminTest(t *testing.T) *adminTest {
	t.Helper()
	r, err := Open(Options{Listen: "127.0.0.1:0", StateDir: filepath.Join(t.TempDir(), "state")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.audit.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		_ = r.Close()
	})
	return &adminTest{t, r, r.routes()}
}

func (t *adminTest) mint(req auth.MintRequest) auth.Minted {
	t.Helper()
	list, err := t.r.store.Mint(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return list[0]
}

// do sends a request and returns status and body.
func (t *adminTest) do(token, method, path, body string) (int, string) {
	t.Helper()
	req := httptest.NewRequest(method, "http://127.0.0.1"+path, strings.NewReader(body))
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	w := httptest.NewRecorder()
	t.routes.ServeHTTP(w, req)
	return w.Code, w.Body.String()
}

// want checks status and a part of the body.
func (t *adminTest) want(token, method, path, body string, status int, part string) string {
	t.Helper()
	code, got := t.do(token, method, path, body)
	if code != status || !strings.Contains(got, part) {
		t.Errorf("%s %s %s: got %d %s, want %d ... %s", method, path, body, code, got, status, part)
	}
	return got
}

// auditFile flushes and reads a file of the audit log.
func (t *adminTest) auditFile(name string) string {
	t.Helper()
	t.r.audit.Flush()
	b, err := os.ReadFile(filepath.Join(t.r.opt.StateDir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// audited returns the audit lines of an operation: its outcomes. It checks that each change which
// was made was recorded before.
func (t *adminTest) audited(tool string) (lines []string) {
	t.Helper()
	begun := 0
	for line := range strings.Lines(t.auditFile(audit.FileName)) {
		switch {
		case !strings.Contains(line, `"tool":"`+tool+`"`):
		case strings.Contains(line, `"decision":"begin"`):
			begun++
		default:
			if strings.Contains(line, `"decision":"allow"`) && !strings.Contains(line, "dry_run") {
				if begun--; begun < 0 {
					t.Errorf("nothing says that this was to be done: %s", line)
				}
			}
			lines = append(lines, line)
		}
	}
	return lines
}

func TestPatchNode(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Subject: "ann"}).Token
	reader := a.mint(auth.MintRequest{Class: "agent"}).Token
	foreign := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Tenant: "zeta"}).Token
	device := a.mint(auth.MintRequest{Class: "device"})
	id := device.NodeID
	path := nodesPath + id

	a.want(admin, "PATCH", path, `{"name":"attic","add_tags":["roof","north"],"description":"under the ridge"}`, 200,
		`"after":{"name":"attic","name_set":true,"tags":["north","roof"],"description":"under the ridge"}`)
	// By name, by prefix; what is not named stays.
	a.want(admin, "PATCH", nodesPath+"attic", `{"remove_tags":["roof"]}`, 200, `"tags":["north"],"description":"under the ridge"}}`)
	a.want(admin, "PATCH", nodesPath+id[:20]+"?dry_run=true", `{"description":""}`, 200, `"tags":["north"],"description":""}}`)
	a.want(reader, "GET", "/v1/nodes?name=attic&tag=north", "", 200, `"name":"attic","name_set":true,"tags":["north"],"description":"under the ridge"`)
	a.want(reader, "GET", "/v1/nodes?tag=north&tag=roof", "", 200, `{"nodes":[]}`)
	a.want(foreign, "GET", "/v1/nodes?name=attic", "", 200, `{"nodes":[]}`)

	for _, tt := range []struct {
		token, path, body string
		status            int
		part              string
	}{
		{"", path, `{"name":"x"}`, 401, "E_SAFETY_DENIED"},
		{device.Token, path, `{"name":"x"}`, 403, "E_SAFETY_DENIED"},
		{reader, path, `{"name":"x"}`, 403, "nodes:write"},
		{foreign, path, `{"name":"x"}`, 403, "this token may not use that node"},
		{admin, nodesPath + manifest.NewNodeID(), `{"name":"x"}`, 403, "this token may not use that node"},
		{admin, nodesPath + "nobody", `{"name":"x"}`, 403, "this token may not use that node"},
		{admin, nodesPath + id + "%2Frevoke", `{"name":"x"}`, 403, "this token may not use that node"},
		{admin, nodesPath + "a%00b", `{"name":"x"}`, 403, "this token may not use that node"},
		{admin, nodesPath + "attic%27%20OR%201=1", `{"name":"x"}`, 403, "this token may not use that node"},
		{admin, path, ``, 400, "strict JSON"},
		{admin, path, `{}`, 400, "strict JSON"},
		{admin, path, `{"add_tags":[]}`, 400, "strict JSON"},
		{admin, path, `{"Name":"x"}`, 400, "strict JSON"},
		{admin, path, `{"name":"x","name":"y"}`, 400, "strict JSON"},
		{admin, path, `{"name":"x"}{}`, 400, "strict JSON"},
		{admin, path, `{"name":"x","tenant":"zeta"}`, 400, "strict JSON"},
		{admin, path, `{"name":["x"]}`, 400, "strict JSON"},
		{admin, path, `{"name":"a.b"}`, 400, `"name: 1 to 32`},
		{admin, path, `{"name":"dachböden"}`, 400, `"name: 1 to 32`},
		{admin, path, `{"add_tags":["a.b"]}`, 400, "tags: "},
		{admin, path, `{"description":"a\u202eb"}`, 400, "description: "},
		{admin, path, `{"description":"` + strings.Repeat("a", 201) + `"}`, 400, "description: "},
		{admin, path, strings.Repeat(" ", maxAdminBody) + `{"name":"x"}`, 413, "64 KiB"},
		{admin, path + "?dry_run=yes", `{"name":"x"}`, 400, "dry_run"},
	} {
		a.want(tt.token, "PATCH", tt.path, tt.body, tt.status, tt.part)
	}
	for _, query := range []string{"tag=A", "tag=a.b", "tag=", "name=A", "name=", "name=a&name=b", "tag=%20x", "limit=0", "x" + strings.Repeat("&tag=a", 17)} {
		a.want(reader, "GET", "/v1/nodes?"+query, "", 400, "E_BAD_REQUEST")
	}
	if got, _ := a.r.store.NodeAttributes(id); got.Name != "attic" || got.Description != "under the ridge" {
		t.Errorf("the refused changes left %+v", got)
	}
	second := a.mint(auth.MintRequest{Class: "device"}).NodeID
	a.want(admin, "PATCH", nodesPath+second, `{"name":"attic"}`, 400, "another node has this name")
	lines := a.audited("nodes.update")
	if len(lines) != 3+21+1 || !strings.Contains(lines[0], `"tenant":"default","actor":"ann","address":"192.0.2.1"`) || !strings.Contains(lines[0], `"node_id":"`+id+`","decision":"allow"`) {
		t.Errorf("%d audit lines: %s", len(lines), lines[0])
	}
}

func TestRevokeAndRemoveNode(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin}).Token
	foreign := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Tenant: "zeta"}).Token
	device := a.mint(auth.MintRequest{Class: "device"})
	path := nodesPath + device.NodeID
	works := func() bool { _, err := a.r.store.Verify(device.Token); return err == nil }

	a.want(foreign, "POST", path+"/revoke", "", 403, "this token may not use that node")
	a.want(foreign, "DELETE", path, "", 403, "this token may not use that node")
	a.want(admin, "POST", path, "", 405, "E_BAD_REQUEST")
	a.want(admin, "PATCH", path+"/revoke", `{"name":"x"}`, 405, "E_BAD_REQUEST")
	a.want(admin, "PATCH", nodesPath, `{"name":"x"}`, 404, "nothing is served")
	a.want(admin, "POST", path+"/revoke", `{"x":1}`, 400, "send no body")
	a.want(admin, "DELETE", path, `{"x":1}`, 400, "send no body")
	a.want(admin, "GET", path, "", 405, "E_BAD_REQUEST")
	a.want(admin, "DELETE", "/v1/nodes", "", 405, "E_BAD_REQUEST")
	a.want(admin, "POST", path+"/revoke?dry_run=true", "", 200, `"revoked_tokens":1`)
	a.want(admin, "DELETE", path+"?dry_run=true", "", 200, `"revoked_tokens":1`)
	if !works() {
		t.Error("a dry run, or somebody else, revoked it")
	}
	a.want(admin, "POST", path+"/revoke", "", 200, `"revoked_tokens":1`)
	if works() {
		t.Error("not revoked")
	}
	a.want(admin, "GET", "/v1/nodes", "", 200, device.NodeID)
	device = a.mint(auth.MintRequest{Class: "device", NodeID: device.NodeID})
	a.want(admin, "DELETE", path, "", 200, `"revoked_tokens":1`)
	a.want(admin, "GET", "/v1/nodes", "", 200, `{"nodes":[]}`)
	a.want(admin, "DELETE", path, "", 403, "this token may not use that node")
	if works() {
		t.Error("the token of a removed node works")
	}
	if n := len(a.audited("nodes.remove")); n != 5 {
		t.Errorf("%d audit lines", n)
	}
}

func TestAdminRate(t *testing.T) {
	a := newAdminTest(t)
	ann := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Subject: "ann"}).Token
	bob := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Subject: "bob"}).Token
	a.want(ann, "DELETE", nodesPath+"x", "", 403, "that node")
	a.r.adminLimits.Charge("default/ann", 10*adminBurst, time.Now())
	a.want(ann, "DELETE", nodesPath+"x", "", 429, "retry_after_ms")
	a.want(bob, "DELETE", nodesPath+"x", "", 403, "that node")
}

// A selection by tags finds the few nodes that have all of them among many, in pages.
func TestNodesByTagAmongMany(t *testing.T) {
	a := newAdminTest(t)
	reader := a.mint(auth.MintRequest{Class: "agent"}).Token
	var list []auth.Minted
	for range 10 { // short transactions: the store bounds the time of each
		part, err := a.r.store.Mint(t.Context(), auth.MintRequest{Class: "device", Count: 60})
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, part...)
	}
	var tags []string
	for i := range auth.MaxTags - 1 {
		tags = append(tags, fmt.Sprint("a-tag-of-a-fleet-", i))
	}
	for i := range 30 { // a transaction each
		_, err := a.r.store.SetNodeAttributes(t.Context(), "default", list[i*20].NodeID, auth.Attributes{AddTags: append(tags, "rare")}, false)
		if err != nil {
			t.Fatal(err)
		}
	}
	const query = "/v1/nodes?tag=rare&tag=a-tag-of-a-fleet-3&limit=20"
	var found []string
	var page struct {
		Nodes []struct {
			NodeID string `json:"node_id"`
		}
		Next string
	}
	for first := true; first || page.Next != ""; first = false {
		path := query + "&after=" + page.Next
		page.Next, page.Nodes = "", nil
		if err := json.Unmarshal([]byte(a.want(reader, "GET", path, "", 200, "rare")), &page); err != nil {
			t.Fatal(err)
		}
		for _, n := range page.Nodes {
			found = append(found, n.NodeID)
		}
	}
	if len(found) != 30 || !slices.IsSorted(found) {
		t.Errorf("found %d nodes: %s", len(found), found)
	}
}

// TestAuditFault: while the audit log cannot be written, changes are refused before they are made, and
// everything else is served.
func TestAuditFault(t *testing.T) {
	a := newAdminTest(t)
	admin := a.mint(auth.MintRequest{Class: auth.PresetTenantAdmin}).Token
	device := a.mint(auth.MintRequest{Class: "device"})
	if err := a.r.audit.Close(); err != nil {
		t.Fatal(err)
	}
	before := a.want(admin, "GET", "/v1/tokens", "", 200, "tokens")
	path := nodesPath + device.NodeID
	for _, c := range []struct{ method, path, body string }{
		{"POST", "/v1/tokens", ""}, {"DELETE", tokensPath + device.JTI, ""}, {"POST", invitesPath, ""}, {"DELETE", invitesPath + "/ABCD", ""},
		{"PATCH", path, `{"name":"attic"}`}, {"POST", path + "/revoke", ""}, {"DELETE", path, ""},
	} {
		a.want(admin, c.method, c.path, c.body, 500, `"reason":"storage"`)
		if got, _ := a.do(admin, c.method, c.path+"?dry_run=true", c.body); got == 500 {
			t.Errorf("a dry run of %s %s needs the audit log", c.method, c.path)
		}
	}
	if after := a.want(admin, "GET", "/v1/tokens", "", 200, "tokens"); after != before {
		t.Errorf("before %s\nafter %s", before, after)
	}
	a.want(admin, "GET", "/v1/nodes", "", 200, `"name_set":false`)
	a.want(admin, "GET", invitesPath, "", 200, `"invites":[]`)
}

// TestStrangers: any number of requests without a token leave the decisions alone, and one line.
func TestStrangers(t *testing.T) {
	a := newAdminTest(t)
	reader := a.mint(auth.MintRequest{Class: "agent", Subject: "ci"}).Token
	a.want(reader, "POST", "/mcp/tools/call", `{"tool":"no.such"}`, 400, "E_BAD_REQUEST")
	for _, token := range []string{"", "x.y.z"} {
		for range 500 {
			a.want(token, "POST", "/mcp/tools/call", `{"tool":"no.such"}`, 401, "E_SAFETY_DENIED")
			a.want(token, "GET", "/v1/nodes", "", 401, "E_SAFETY_DENIED")
		}
	}
	if log := a.auditFile(audit.FileName); strings.Count(log, "\n") != 1 || !strings.Contains(log, `"actor":"ci","address":"192.0.2.1"`) {
		t.Errorf("decisions:\n%.500s", log)
	}
	if log := a.auditFile(audit.RefusalsFileName); strings.Count(log, "\n") != 1 || !strings.Contains(log, `"address":"192.0.2.1","count":2000,"reasons":{`) {
		t.Errorf("refusals:\n%.500s", log)
	}
	var lines int
	for range 100 {
		for i := range byte(3) {
			if a.r.mayLogStranger(netip.AddrFrom4([4]byte{192, 0, 2, i})) {
				lines++
			}
		}
	}
	if lines != 3 {
		t.Errorf("%d log lines about 3 addresses", lines)
	}
}
