-- Leases of partitions.
--
-- leases   HASH  partition -> "<expiry ms> <member id>"

local LEASE = '%d %s'
local LEASE_PATTERN = '^(%d+) (.*)$'

-- Returns the member that holds a lease, and the ms at which the lease ends; nil if there is no lease or it has expired.
local function holder_of(lease, now)
  if not lease then
    return nil
  end
  local expiry, member = string.match(lease, LEASE_PATTERN)
  if tonumber(expiry) <= now then
    return nil
  end
  return member, tonumber(expiry)
end

-- Returns true if this is the member's own lease, expired or not.
local function is_lease_of(lease, member)
  local _, holder = string.match(lease, LEASE_PATTERN)
  return holder == member
end
