package journal

import (
	"strings"
	"testing"
)

func TestRedact(t *testing.T) {
	jwt := "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"
	tests := []struct{ in, want string }{
		{"token " + jwt + " used", "token [redacted] used"},
		{"a -----BEGIN OPENSSH PRIVATE KEY-----\nabc\ndef\n-----END OPENSSH PRIVATE KEY----- b", "a [redacted] b"},
		{"key -----BEGIN RSA PRIVATE KEY-----\nMIIEow", "key [redacted]"},
		{"password=hunter2 user=ann", "password=[redacted] user=ann"},
		{`{"password":"hunter 2","user":"ann"}`, `{"password":[redacted],"user":"ann"}`},
		{`msg="{\"password\":\"hunter2\",\"user\":1}"`, `msg="{\"password\":[redacted],\"user\":1}"`},
		{"DB_PASSWORD: hunter2", "DB_PASSWORD: [redacted]"},
		{"DB_PASSWORD = 'hunter 2' next", "DB_PASSWORD = [redacted] next"},
		{"GET /?access_token=abc123&x=1 HTTP/1.1", "GET /?access_token=[redacted]&x=1 HTTP/1.1"},
		{"Authorization: Bearer abc.def", "Authorization: [redacted]"},
		{`curl -H "Authorization: Basic YW5uOmh1bnRlcjI=" http://x/`, `curl -H "Authorization: [redacted]" http://x/`},
		{"sent bearer 0123456789abcdef", "sent bearer [redacted]"},
		{"Set-Cookie: sid=31d4d96e; Path=/", "Set-Cookie: [redacted]"},
		{"fetch https://ann:hunter2@example.com/x", "fetch https://[redacted]@example.com/x"},
		{"fetch https://ghp_0123@example.com/x", "fetch https://[redacted]@example.com/x"},
		{"postgres://u:p@db:5432/x", "postgres://[redacted]@db:5432/x"},
		{"key AKIAIOSFODNN7EXAMPLE is used", "key [redacted] is used"},
		{"aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "aws_secret_access_key = [redacted]"},
		{"clone with ghp_0123456789abcdefghijABCDEFGHIJ", "clone with [redacted]"},
		{"mysql --password hunter2 -h db", "mysql --password [redacted] -h db"},
		{"mysql --password=hunter2", "mysql --password=[redacted]"},
		{"curl -u ann:hunter2 http://x/", "curl -u [redacted] http://x/"},
		{"sshpass -p hunter2 ssh x", "sshpass -p [redacted] ssh x"},
		{"agentctl join https://r:8460 7K3M-9QTR-2HXW-DB5N", "agentctl join https://r:8460 [redacted]"},
		{"root:$6$abcdefgh$0123456789abcdefghijklmnop:19000", "root:[redacted]:19000"},
		{"psk=0123456789", "psk=[redacted]"},
		{"b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW", "[redacted]"},
		// What must stay.
		{"Failed password for root from 10.0.0.1 port 22 ssh2", ""},
		{"Accepted publickey for ann from 10.0.0.1 port 50022 ssh2: ED25519 SHA256:abcdefghijklmnop", ""},
		{"GET http://example.com:8080/a@b?x=1 200", ""},
		{"started with --token-file /etc/agentctl/token", ""},
		{"basic authentication failed for ann", ""},
		{"Main process exited, code=exited, status=1/FAILURE", ""},
		{"max_tokens=5 prompt ok", ""},
		{"commit 0123456789abcdef0123456789abcdef01234567 built", ""},
		{"", ""},
	}
	for _, tt := range tests {
		want, replaced := tt.want, strings.Count(tt.want, redacted)
		if want == "" {
			want = tt.in
		}
		if got, n := redact(tt.in); got != want || n != replaced {
			t.Errorf("%q became %q (%d), want %q (%d)", tt.in, got, n, want, replaced)
		}
		if again, n := redact(want); again != want || n != 0 {
			t.Errorf("%q became %q the second time (%d)", want, again, n)
		}
	}
}

// FuzzRedact checks that redaction ends and does not add anything but the mask.
func FuzzRedact(f *testing.F) {
	f.Add("password=a token: b https://u:p@h -----BEGIN X-----")
	f.Fuzz(func(t *testing.T, s string) {
		clean, n := redact(s)
		if n == 0 && clean != s {
			t.Errorf("%q became %q without a secret", s, clean)
		}
		if n > 0 && !strings.Contains(clean, redacted) {
			t.Errorf("%q became %q", s, clean)
		}
	})
}

// FuzzParseEntry checks that no line panics, and what is kept of it is bounded.
func FuzzParseEntry(f *testing.F) {
	f.Add([]byte(testEntry(1, `[1,2,"a"]`)))
	f.Add([]byte(testEntry(1, `"x`)))
	f.Fuzz(func(t *testing.T, line []byte) {
		e := parseEntry(line)
		_, _ = e.redact(textFilter{})
		if len([]rune(e.Unit)) > 256 || len([]rune(e.Source)) > 64 || len([]rune(e.Message)) > maxMessage || e.PID < 0 || e.TSMS < 0 {
			t.Errorf("%+v", e)
		}
	})
}
