package manifest

import "testing"

func TestRetryable(t *testing.T) {
	for _, tt := range []struct {
		err  Error
		want bool
	}{
		{Error{Code: NodeOffline}, true},
		{Error{Code: DeadlineExceeded}, false},
		{Error{Code: SafetyDenied}, false},
		{Error{Code: NodeOffline, Outcome: NotSent}, true},
		{Error{Code: DeadlineExceeded, Outcome: NotSent}, true},
		{Error{Code: SafetyDenied, Outcome: NotSent}, false},
		{Error{Code: NodeOffline, Outcome: OutcomeUnknown}, false},
		{Error{Code: DeadlineExceeded, Outcome: OutcomeUnknown}, false},
		{Error{Code: NodeOffline, Outcome: OutcomeUnknown, ReadOnly: true}, true},
		{Error{Code: DeadlineExceeded, Outcome: OutcomeUnknown, ReadOnly: true}, true},
	} {
		if got := tt.err.Retryable(); got != tt.want {
			t.Errorf("%+v: retryable %v", tt.err, got)
		}
	}
}

// A caller gets no reason that is not in the documented list, and of a denial none at all unless
// an endpoint says so: a reason would distinguish a revoked token from an unknown one.
func TestPublicReason(t *testing.T) {
	for _, tt := range []struct {
		err  Error
		want string
	}{
		{Error{Code: NodeOffline, Reason: "offline"}, "offline"},
		{Error{Code: RateLimited, Reason: "offline"}, ""},
		{Error{Code: SafetyDenied, Reason: "revoked"}, ""},
		{Error{Code: SafetyDenied, Reason: "revoked", ShowReason: true}, "revoked"},
		{Error{Code: BadRequest, Reason: "tool"}, ""},
		{Error{Code: Internal, Reason: "panic"}, ""},
	} {
		if got := tt.err.PublicReason(); got != tt.want {
			t.Errorf("%+v: reason %q, want %q", tt.err, got, tt.want)
		}
	}
	for code := range publicReasons {
		if code == SafetyDenied || code == BadRequest || code == ManifestInvalid {
			t.Errorf("%s has public reasons", code)
		}
	}
}
