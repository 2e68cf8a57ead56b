package journal

import (
	"strings"

	"agentctl/lazyregexp"
)

// redacted replaces what looks like a secret.
const redacted = "[redacted]"

// secretForms are the forms of secrets that redact knows. Each has one group, which is replaced. They
// replace too much rather than too little: a missing word in a log line costs less than a password
// that becomes public.
var secretForms = []*lazyregexp.Regexp{
	// PEM blocks, also those that the end of the line cuts.
	lazyregexp.New(`(?s)(-----BEGIN [A-Z0-9 ]{1,40}-----.*?(?:-----END [A-Z0-9 ]{1,40}-----|\z))`),
	// Userinfo of a URL.
	lazyregexp.New(`(?i)\b[a-z][a-z0-9+.-]{0,20}://([^\s/?#@"'<>]+)@`),
	// HTTP headers.
	lazyregexp.New(`(?i)\b(?:proxy-)?authorization\b\\?["']?[ \t]*[:=][ \t]*\\?["']?([^"'\\\r\n]+)`),
	lazyregexp.New(`(?i)\b(?:set-)?cookie\b\\?["']?[ \t]*[:=][ \t]*\\?["']?([^"'\\\r\n]+)`),
	lazyregexp.New(`(?i)\bbearer[ \t]+([a-z0-9._~+/=-]{8,})`),
	// JWTs and JWEs.
	lazyregexp.New(`\b(eyJ[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*){1,4})`),
	// Tokens that name their issuer: AWS, GitHub, GitLab, Slack, Google, Stripe, npm, PyPI, Hugging
	// Face, DigitalOcean, SendGrid, Telegram, model providers, age.
	lazyregexp.New(`\b((?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA|AGPA|ANPA)[A-Z0-9]{16})\b`),
	lazyregexp.New(`\b(gh[a-z]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|gl[a-z]{2,5}-[A-Za-z0-9_-]{20,}|xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}` +
		`|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{10,}|[srp]k[-_](?:live|test|proj|ant|or)[-_][A-Za-z0-9_-]{16,}|sk-[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{20,}` +
		`|pypi-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{20,}|do[opr]_v1_[a-f0-9]{32,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|\d{8,10}:AA[A-Za-z0-9_-]{32,}|AGE-SECRET-KEY-1[A-Z0-9]{20,})`),
	// Invite codes of agentctl.
	lazyregexp.New(`\b([0-9A-HJKMNP-TV-Z]{4}(?:-[0-9A-HJKMNP-TV-Z]{4}){3})\b`),
	// Hashes of passwords, as in /etc/shadow.
	lazyregexp.New(`(\$(?:1|2[abxy]|5|6|7|y|gy|argon2[a-z]{1,2}|scrypt)\$[./A-Za-z0-9$=,+]{16,})`),
	// name=value and name: value, in quotes or not, in JSON or not. The name ends in a word for a secret.
	lazyregexp.New(`(?i)(?:passw(?:or)?d|passphrase|passwd|pwd|psk|secret|token|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|auth[_-]?key|encryption[_-]?key|client[_-]?key|secret[_-]?key|credentials?|signature)` +
		`(?:[_-][a-z0-9_-]{1,20})?\\?["']?[ \t]*[:=]+>?[ \t]*(\\?"[^"]*"?|'[^']*'?|[^\s"',;&<>]+)`),
	// Flags of programs.
	lazyregexp.New(`(?i)(?:^|\s)--?[a-z0-9-]*(?:password|passwd|passphrase|token|secret|api-?key)[ \t]+("[^"]*"?|'[^']*'?|[^\s-]\S*)`),
	lazyregexp.New(`(?:^|\s)(?:-u|--user)[ =]([^\s:/]+:[^\s/]\S*)`),
	lazyregexp.New(`\bsshpass[ \t]+-p[ \t]*(\S+)`),
	// A line of a PEM block, which journald stores as separate lines.
	lazyregexp.New(`^\s*([A-Za-z0-9+/]{40,128}={0,2})\s*$`),
	lazyregexp.New(`^\s*([A-Za-z0-9+/]{16,128}={1,2})\s*$`),
}

// redact replaces what looks like a secret in a message, and returns how many secrets it replaced. The
// forms are applied one after the other; one that matches a replaced secret again does not count.
func redact(s string) (clean string, n int) {
	for _, form := range secretForms {
		matches := form.FindAllStringSubmatchIndex(s, -1)
		if matches == nil {
			continue
		}
		var b strings.Builder
		end := 0
		for _, m := range matches {
			secret := s[m[2]:m[3]]
			if secret == redacted {
				continue
			}
			b.WriteString(s[end:m[2]])
			b.WriteString(redacted)
			end = m[3]
			n++
		}
		b.WriteString(s[end:])
		s = b.String()
	}
	return s, n
}
