package relay

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/enrollment"
	"agentctl/manifest"
	"agentctl/relay/audit"
	"agentctl/relay/auth"
)

const testInstanceID = "00112233445566778899aabbccddeeff"

// fakeSessions stands for the hub.
type fakeSessions struct {
	live      string        // session of the node's link; "": none that answers
	age       time.Duration // of the link
	extended  []string
	suspected []string
}

func (f *fakeSessions) LiveSession(context.Context, string) (string, time.Duration, bool) {
	return f.live, f.age, f.live != ""
}
func (f *fakeSessions) ExtendGrant(node, session string, _ time.Time) {
	f.extended = append(f.extended, node+" "+session)
}
func (f *fakeSessions) SuspectClone(node string) { f.suspected = append(f.suspected, node) }

// joinTest is an adminTest with a client of the endpoints for joining.
type joinTest struct {
	*adminTest
	sessions *fakeSessions
	key      ed25519.PrivateKey
	from     string // address of the client
}

func newJoinTest(t *testing.T) *joinTest {
	t.Helper()
	j := &joinTest{adminTest: newAdminTest(t), sessions: &fakeSessions{}, from: "192.0.2.1:1000"}
	j.r.sessions = j.sessions
	j.newKey()
	return j
}

func (j *joinTest) newKey() { _, j.key, _ = ed25519.GenerateKey(nil) }

// send sends a request and decodes the answer into v.
func (j *joinTest) send(method, path string, header http.Header, body any, v any) int {
	j.Helper()
	raw, ok := body.(string)
	if !ok {
		b, err := json.Marshal(body)
		if err != nil {
			j.Fatal(err)
		}
		raw = string(b)
	}
	req := httptest.NewRequest(method, "http://127.0.0.1"+path, strings.NewReader(raw))
	req.Header.Set("Content-Type", "application/json")
	for k, values := range header {
		req.Header[k] = values
	}
	req.RemoteAddr = j.from
	w := httptest.NewRecorder()
	j.routes.ServeHTTP(w, req)
	if err := json.Unmarshal(w.Body.Bytes(), v); err != nil {
		j.Fatalf("%s %s: %d %q: %v", method, path, w.Code, w.Body, err)
	}
	if cc := w.Header().Get("Cache-Control"); cc != "no-store" {
		j.Errorf("%s %s: Cache-Control %q", method, path, cc)
	}
	return w.Code
}

func (j *joinTest) nonce() string {
	var n enrollment.Nonce
	if status := j.send("GET", enrollment.EnrollPath, nil, "", &n); status != 200 {
		j.Fatalf("nonce: %d", status)
	}
	return n.Nonce
}

// refusal is the envelope of an error answer.
type refusal struct {
	Error struct {
		Code         manifest.Code `json:"code"`
		Message      string        `json:"message"`
		Reason       string        `json:"reason"`
		Retryable    bool          `json:"retryable"`
		RetryAfterMS int64         `json:"retry_after_ms"`
		TraceID      string        `json:"trace_id"`
	} `json:"error"`
}

func (j *joinTest) enrollBody(code string) *enrollment.EnrollRequest {
	nonce := j.nonce()
	return &enrollment.EnrollRequest{Nonce: nonce, Code: code, PublicKey: enrollment.EncodeKey(j.key.Public().(ed25519.PublicKey)), InstanceID: testInstanceID,
		AgentVersion: "v1", Proof: enrollment.Sign(j.key, enrollment.EnrollMessage(nonce, code, testInstanceID))}
}

// enroll returns the answer, or status and reason of a refusal.
func (j *joinTest) enroll(code string) (a enrollment.EnrollAnswer, refused string) {
	j.Helper()
	var v struct {
		enrollment.EnrollAnswer
		refusal
	}
	if status := j.send("POST", enrollment.EnrollPath, nil, j.enrollBody(code), &v); status != 200 {
		refused = fmt.Sprint(status, " ", v.Error.Reason)
	}
	return v.EnrollAnswer, refused
}

// refresh names a generation and a session.
func (j *joinTest) refresh(nodeID string, gen int, session string) (a enrollment.TokenAnswer, refused string) {
	j.Helper()
	nonce, request := j.nonce(), manifest.NewULID()
	var v struct {
		enrollment.TokenAnswer
		refusal
	}
	status := j.send("POST", enrollment.TokenPath, nil, &enrollment.TokenRequest{NodeID: nodeID, Gen: gen, RequestID: request, Nonce: nonce, SessionID: session,
		Proof: enrollment.Sign(j.key, enrollment.TokenMessage(nonce, nodeID, gen, request))}, &v)
	if status != 200 {
		refused = fmt.Sprint(status, " ", v.Error.Reason)
		if v.Error.Retryable != (v.Error.Reason == enrollment.ReasonSession) {
			j.Errorf("%s: retryable is %t", refused, v.Error.Retryable)
		}
	}
	return v.TokenAnswer, refused
}

func (j *joinTest) invite(req auth.InviteRequest) string {
	j.Helper()
	_, code, err := j.r.store.CreateInvite(j.Context(), req)
	if err != nil {
		j.Fatal(err)
	}
	return code
}

// TestEnrollBoard: an invite code makes a node with a token of 30 days, and the same request gives the
// same node again. The key of the board then refreshes the token.
func TestEnrollBoard(t *testing.T) {
	j := newJoinTest(t)
	code := j.invite(auth.InviteRequest{Name: "attic"})
	a, refused := j.enroll(code)
	if refused != "" || !manifest.ValidNodeID(a.NodeID) || a.DeviceToken == "" || a.AgentID != "" || a.Token != "" || a.TenantID != "default" ||
		a.Name != "attic" || a.Gen != 1 || a.CA != "" {
		t.Fatalf("got %+v, refused %q; want a node named attic with its first token", a, refused)
	}
	if left := time.Until(time.UnixMilli(a.ExpiresAtMS)); left > auth.BoardTokenTTL || left < auth.BoardTokenTTL-time.Minute {
		t.Errorf("the token is valid for %v, want %v", left, auth.BoardTokenTTL)
	}
	if again, refused := j.enroll(code); refused != "" || again.NodeID != a.NodeID {
		t.Errorf("the same request again: node %q, refused %q; want node %s", again.NodeID, refused, a.NodeID)
	}
	if b, refused := j.refresh(a.NodeID, 1, ""); refused != "" || b.Gen != 2 || b.Token == "" {
		t.Errorf("refresh: %+v, refused %q; want a token of generation 2", b, refused)
	}
	if n := j.r.queue.Stats().Waiting; n != 1 {
		t.Errorf("%d events about joining, want 1: that of the first request", n)
	}
}

// TestJoinRefusals: each refusal has its status and its reason.
func TestJoinRefusals(t *testing.T) {
	j := newJoinTest(t)
	code := j.invite(auth.InviteRequest{})
	board, refused := j.enroll(code)
	if refused != "" {
		t.Fatal(refused)
	}
	usedKey := j.key
	enroll := func(code string) string { _, refused := j.enroll(code); return refused }
	// enrollWith enrolls with a request that was changed.
	enrollWith := func(change func(*enrollment.EnrollRequest)) string {
		body := j.enrollBody(j.invite(auth.InviteRequest{}))
		change(body)
		var v refusal
		return fmt.Sprint(j.send("POST", enrollment.EnrollPath, nil, body, &v), " ", v.Error.Reason)
	}
	for _, tt := range []struct {
		name string
		want string
		try  func() string
	}{
		{"a code that another board has used", "410 used", func() string { j.newKey(); return enroll(code) }},
		{"a code that no invite has", "403 code_unknown", func() string { j.newKey(); return enroll(enrollment.NewCode()) }},
		{"a key of another board", "409 key_in_use", func() string { j.key = usedKey; return enroll(j.invite(auth.InviteRequest{})) }},
		{"a revoked invite", "403 revoked", func() string {
			revoked := j.invite(auth.InviteRequest{})
			if _, err := j.r.store.RevokeInvite(t.Context(), "", revoked[:4], false); err != nil {
				t.Fatal(err)
			}
			j.newKey()
			return enroll(revoked)
		}},
		{"a nonce of nobody", "409 nonce", func() string {
			j.newKey()
			return enrollWith(func(r *enrollment.EnrollRequest) { r.Nonce = "x" })
		}},
		{"a malformed earlier token", "403 token_invalid", func() string {
			j.newKey()
			return enrollWith(func(r *enrollment.EnrollRequest) { r.Token = "x.y.z" })
		}},
		{"a refresh with another key", "401 proof", func() string { j.newKey(); _, refused := j.refresh(board.NodeID, 1, ""); return refused }},
	} {
		if got := tt.try(); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestJoinIsRecorded: joining is counted and audited, and neither the metrics nor the audit log has
// a secret.
func TestJoinIsRecorded(t *testing.T) {
	j := newJoinTest(t)
	code := j.invite(auth.InviteRequest{})
	a, _ := j.enroll(code)
	j.enroll(code)
	j.refresh(a.NodeID, 1, "")
	usedKey := j.key
	j.newKey()
	j.enroll(code)             // used
	j.refresh(a.NodeID, 1, "") // proof
	j.key = usedKey
	j.enroll(j.invite(auth.InviteRequest{})) // key_in_use

	metrics := string(j.r.writeMetrics(nil))
	for _, line := range []string{`agentctl_enrollments_total{result="new"} 1`, `agentctl_enrollments_total{result="repeat"} 1`,
		`agentctl_enrollments_total{result="used"} 1`, `agentctl_token_refreshes_total{result="new"} 1`, `agentctl_token_refreshes_total{result="proof"} 1`} {
		if !strings.Contains(metrics, line+"\n") {
			t.Errorf("the metrics have no %s", line)
		}
	}
	log := j.auditFile(audit.FileName) + j.auditFile(audit.RefusalsFileName)
	for _, part := range []string{`"tool":"enroll","node_id":"` + a.NodeID + `","decision":"allow","reason":"new"`, `"enroll key_in_use":1`, `"tool":"token"`, `"token proof":1`} {
		if !strings.Contains(log, part) {
			t.Errorf("the audit log has no %s:\n%s", part, log)
		}
	}
	for _, secret := range []string{code, enrollment.HashCode(code), a.DeviceToken} {
		if strings.Contains(log+metrics, secret) {
			t.Error("the audit log or the metrics have a secret")
		}
	}
}

func TestJoinAgentOverHTTP(t *testing.T) {
	j := newJoinTest(t)
	a, refused := j.enroll(j.invite(auth.InviteRequest{Class: auth.InviteAgent, Name: "claude"}))
	if refused != "" || a.AgentID != "claude" || a.Token == "" || a.NodeID != "" || a.DeviceToken != "" || a.Name != "" {
		t.Fatalf("%+v, %s", a, refused)
	}
	j.want(a.Token, "GET", "/v1/nodes", "", 200, `"nodes":[]`)
}

// TestRefreshAndLink: while a link of the node answers, only a request of that session is
// served, and the link lives on.
func TestRefreshAndLink(t *testing.T) {
	j := newJoinTest(t)
	a, _ := j.enroll(j.invite(auth.InviteRequest{}))
	j.sessions.live, j.sessions.age = manifest.NewULID(), time.Hour
	for _, session := range []string{"", manifest.NewULID()} {
		if _, refused := j.refresh(a.NodeID, 1, session); refused != "409 session" {
			t.Errorf("session %q: %q", session, refused)
		}
	}
	if len(j.sessions.suspected) != 2 || len(j.sessions.extended) != 0 {
		t.Errorf("%+v", j.sessions)
	}
	// A request that was on its way while the board's link was replaced is no clone; one that
	// names no session is, since only a board with a link refreshes before the relay refuses it.
	j.sessions.age, j.sessions.suspected = time.Second, nil
	for session, want := range map[string]int{manifest.NewULID(): 0, "": 1} {
		if _, refused := j.refresh(a.NodeID, 1, session); refused != "409 session" || len(j.sessions.suspected) != want {
			t.Errorf("a link of a second, session %q: %q, %+v", session, refused, j.sessions)
		}
		j.sessions.suspected = nil
	}
	if b, refused := j.refresh(a.NodeID, 1, j.sessions.live); refused != "" || b.Gen != 2 {
		t.Fatalf("%+v, %s", b, refused)
	}
	if len(j.sessions.extended) != 1 || j.sessions.extended[0] != a.NodeID+" "+j.sessions.live {
		t.Errorf("%+v", j.sessions)
	}
	// The link is gone, or half open.
	j.sessions.live, j.sessions.suspected = "", nil
	if _, refused := j.refresh(a.NodeID, 2, manifest.NewULID()); refused != "" {
		t.Error(refused)
	}
	if len(j.sessions.extended) != 1 || len(j.sessions.suspected) != 0 {
		t.Errorf("%+v", j.sessions)
	}
	if _, refused := j.refresh(a.NodeID, 2, ""); refused != "" || len(j.sessions.suspected) != 1 {
		t.Errorf("the generation before: %q, %+v", refused, j.sessions)
	}
	if _, refused := j.refresh(a.NodeID, 1, ""); refused != "401 generation_used" || len(j.sessions.suspected) != 2 {
		t.Errorf("an old generation: %q, %+v", refused, j.sessions)
	}
	// A stranger does not raise an alarm, nor does he make the relay ping.
	j.newKey()
	if _, refused := j.refresh(a.NodeID, 1, ""); refused != "401 proof" || len(j.sessions.suspected) != 2 {
		t.Errorf("a stranger: %q, %+v", refused, j.sessions)
	}
}

func TestJoinRateLimit(t *testing.T) {
	j := newJoinTest(t)
	code := j.invite(auth.InviteRequest{})
	guess := func() string { _, s := j.enroll(enrollment.NewCode()); return s }
	for i := range maxEnrollFailures {
		if got := guess(); got != "403 code_unknown" {
			t.Fatalf("guess %d: %s", i, got)
		}
	}
	if got := guess(); got != "429 rate" {
		t.Errorf("one more: %s", got)
	}
	var v refusal
	j.send("POST", enrollment.EnrollPath, nil, j.enrollBody(code), &v)
	if v.Error.Code != manifest.RateLimited || v.Error.RetryAfterMS < 1 || v.Error.RetryAfterMS > 6000 {
		t.Errorf("a good code is refused with %+v", v)
	}
	j.from = "192.0.2.2:1000"
	if a, refused := j.enroll(code); refused != "" {
		t.Errorf("from another address: %+v, %s", a, refused)
	}
	// Nonces that have become too old do not count.
	j.from = "192.0.2.3:1000"
	for range maxEnrollFailures + 1 {
		b := j.enrollBody(code)
		b.Nonce = "x"
		if status := j.send("POST", enrollment.EnrollPath, nil, b, &v); status != http.StatusConflict {
			t.Fatalf("status %d", status)
		}
	}
	if log := j.auditFile(audit.FileName) + j.auditFile(audit.RefusalsFileName); strings.Contains(log, "nonce") {
		t.Errorf("audit log:\n%s", log)
	}
}

func TestJoinBodies(t *testing.T) {
	j := newJoinTest(t)
	var v refusal
	n := 0
	for _, path := range []string{enrollment.EnrollPath, enrollment.TokenPath} {
		for body, status := range map[string]int{
			"":                     400,
			"{":                    400,
			"[]":                   400,
			`{"nonce":"a","x":1}`:  400,
			`{"Nonce":"a"}`:        400,
			`{"gen":1,"gen":2}`:    400,
			`{"nonce":1}`:          400,
			`{"nonce":"a"} {}`:     400,
			"{\"nonce\":\"\xff\"}": 400,
			`{"nonce":"` + strings.Repeat("a", maxJoinBody) + `"}`: 413,
		} {
			n++
			j.from = fmt.Sprintf("192.0.2.%d:1", n)
			if got := j.send("POST", path, nil, body, &v); got != status || v.Error.Code != manifest.BadRequest {
				t.Errorf("%s %.40q: %d %+v", path, body, got, v)
			}
		}
		if got := j.send("POST", path, http.Header{"Content-Type": {"text/plain"}}, "{}", &v); got != 400 {
			t.Errorf("%s as text: %d", path, got)
		}
		w := httptest.NewRecorder()
		req := httptest.NewRequest("POST", "http://127.0.0.1"+path, strings.NewReader("{}"))
		req.Header.Set("Origin", "http://127.0.0.1")
		j.routes.ServeHTTP(w, req)
		if w.Code != http.StatusForbidden {
			t.Errorf("%s from a page: %d", path, w.Code)
		}
	}
	// Ids that are none are not written to the audit log.
	j.from = "192.0.3.1:1"
	j.send("POST", enrollment.TokenPath, nil, &enrollment.TokenRequest{NodeID: strings.Repeat("A", 1000), Gen: 1, RequestID: manifest.NewULID()}, &v)
	j.send("POST", enrollment.TokenPath, nil, &enrollment.TokenRequest{AgentID: strings.Repeat("A", 1000), Gen: 1, RequestID: manifest.NewULID()}, &v)
	if log := j.auditFile(audit.FileName) + j.auditFile(audit.RefusalsFileName); strings.Contains(log, "AAAA") {
		t.Errorf("audit log:\n%s", log)
	}
	w := httptest.NewRecorder()
	j.routes.ServeHTTP(w, httptest.NewRequest("DELETE", "http://127.0.0.1"+enrollment.EnrollPath, nil))
	if w.Code != http.StatusMethodNotAllowed || !strings.Contains(w.Header().Get("Allow"), "POST") {
		t.Errorf("DELETE: %d %v", w.Code, w.Header())
	}
}

func TestInvitesOverHTTP(t *testing.T) {
	j := newJoinTest(t)
	admin := j.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Tenant: "acme"}).Token
	other := j.mint(auth.MintRequest{Class: auth.PresetTenantAdmin, Tenant: "other"}).Token
	agent := j.mint(auth.MintRequest{Class: "agent", Tenant: "acme"}).Token
	j.want("", "POST", "/v1/invites", "{}", 401, "E_SAFETY_DENIED")
	j.want(agent, "POST", "/v1/invites", "{}", 403, "invites:write")
	j.want(agent, "GET", "/v1/invites", "", 403, "invites:write")
	j.want(admin, "POST", "/v1/invites", `{"tenant_id":"other"}`, 403, "E_SAFETY_DENIED")
	j.want(admin, "POST", "/v1/invites", `{"class":"agent","scopes":["kernel:admin"]}`, 403, "lacks")
	j.want(admin, "POST", "/v1/invites", `{"uses":-1}`, 400, "E_BAD_REQUEST")
	j.want(admin, "POST", "/v1/invites", `{"ttl_ms":99999999999999}`, 400, "E_BAD_REQUEST")
	j.want(admin, "POST", "/v1/invites", `{"user":1}`, 400, "E_BAD_REQUEST")
	j.want(admin, "POST", "/v1/invites?dry_run=true", "", 200, `"state":"open"`)
	j.want(admin, "GET", "/v1/invites", "", 200, `"invites":[]`)
	var made struct {
		Code, Prefix, URL, State string
		CASHA256                 *string `json:"ca_sha256"`
		Tenant                   string  `json:"tenant_id"`
		ExpiresAtMS              int64   `json:"expires_at_ms"`
	}
	body := j.want(admin, "POST", "/v1/invites", `{"name":"attic","tags":["roof"],"uses":1,"ttl_ms":3600000}`, 200, `"ca_sha256":null`)
	if err := json.Unmarshal([]byte(body), &made); err != nil {
		t.Fatal(err)
	}
	if code, err := enrollment.ParseCode(made.Code); err != nil || code != made.Code || made.Prefix != code[:4] || made.URL != j.r.URL() || made.Tenant != "acme" {
		t.Errorf("%s", body)
	}
	if list := j.want(admin, "GET", "/v1/invites", "", 200, `"prefix":"`+made.Prefix+`"`); strings.Contains(list, made.Code) {
		t.Error("the list has the code")
	}
	if a, refused := j.enroll(made.Code); refused != "" || a.TenantID != "acme" || a.Name != "attic" {
		t.Errorf("%+v, %s", a, refused)
	}
	j.want(other, "GET", "/v1/invites", "", 200, `"invites":[]`)
	j.want(other, "DELETE", "/v1/invites/"+made.Prefix, "", 400, "no invite begins with this")
	j.want(admin, "DELETE", "/v1/invites/"+made.Code, "", 400, "first four characters")
	j.want(admin, "DELETE", "/v1/invites/"+made.Prefix+"?dry_run=true", "", 200, `"state":"revoked"`)
	j.want(admin, "GET", "/v1/invites", "", 200, `"state":"used"`)
	j.want(admin, "DELETE", "/v1/invites/"+strings.ToLower(made.Prefix), "", 200, `"state":"revoked"`)
	if _, refused := j.enroll(made.Code); refused != "403 revoked" {
		t.Errorf("a repeat after the revocation: %s", refused)
	}
}

// FuzzJoinBodies: whatever is posted, the answer is the error envelope with a status below
// 500, and nothing joins.
func FuzzJoinBodies(f *testing.F) {
	r, err := Open(Options{Listen: "127.0.0.1:0", StateDir: filepath.Join(f.TempDir(), "state")})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = r.Close() })
	routes := r.routes()
	_, code, err := r.store.CreateInvite(context.Background(), auth.InviteRequest{})
	if err != nil {
		f.Fatal(err)
	}
	for _, v := range []any{enrollment.EnrollRequest{Nonce: r.store.Nonce(), Code: code, InstanceID: testInstanceID},
		enrollment.TokenRequest{Nonce: r.store.Nonce(), NodeID: manifest.NewNodeID(), Gen: 1, RequestID: manifest.NewULID()}} {
		b, _ := json.Marshal(v)
		f.Add(string(b), true)
		f.Add(string(b), false)
	}
	n := 0
	f.Fuzz(func(t *testing.T, body string, enroll bool) {
		path := enrollment.TokenPath
		if enroll {
			path = enrollment.EnrollPath
		}
		req := httptest.NewRequest("POST", "http://127.0.0.1"+path, strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		n++
		req.RemoteAddr = fmt.Sprintf("10.%d.%d.%d:1", n>>16&255, n>>8&255, n&255)
		w := httptest.NewRecorder()
		routes.ServeHTTP(w, req)
		var v refusal
		if json.Unmarshal(w.Body.Bytes(), &v) != nil || !v.Error.Code.Valid() || w.Code < 400 || w.Code >= 500 {
			t.Fatalf("%q: %d %s", body, w.Code, w.Body)
		}
	})
}
