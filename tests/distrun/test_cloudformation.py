"""The CloudFormation template: what it creates in an account, that deletion leaves nothing, how a failure is told."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jmespath
import pytest
from awskit import TEMPLATE, Account, aws, aws_server

__all__ = ["aws", "aws_server"]
pytestmark = pytest.mark.timeout(600)  # Amazon's program takes a second of processor time a call

ROOT = Path(__file__).resolve().parents[2]
ID = re.compile("[a-z]+-[0-9a-f]+")
LISTS = {
    "AWS::EC2::VPC": ("ec2", "describe_vpcs", "Vpcs[].VpcId"),
    "AWS::EC2::Subnet": ("ec2", "describe_subnets", "Subnets[].SubnetId"),
    "AWS::EC2::InternetGateway": ("ec2", "describe_internet_gateways", "InternetGateways[].InternetGatewayId"),
    "AWS::EC2::VPCGatewayAttachment": ("ec2", "describe_internet_gateways", "InternetGateways[].Attachments[].VpcId"),
    "AWS::EC2::RouteTable": ("ec2", "describe_route_tables", "RouteTables[].RouteTableId"),
    "AWS::EC2::Route": (
        "ec2",
        "describe_route_tables",
        "RouteTables[].join('~', [RouteTableId, Routes[?GatewayId != 'local'].DestinationCidrBlock | [0] || ''])",
    ),
    "AWS::EC2::SubnetRouteTableAssociation": ("ec2", "describe_route_tables", "RouteTables[].Associations[].SubnetId"),
    "AWS::EC2::SecurityGroup": ("ec2", "describe_security_groups", "SecurityGroups[].GroupId"),
    "AWS::EC2::SecurityGroupIngress": (
        "ec2",
        "describe_security_groups",
        "SecurityGroups[].IpPermissions[].UserIdGroupPairs[].GroupId",
    ),
    "AWS::EC2::PlacementGroup": ("ec2", "describe_placement_groups", "PlacementGroups[].GroupName"),
    "AWS::EC2::LaunchTemplate": ("ec2", "describe_launch_templates", "LaunchTemplates[].LaunchTemplateId"),
    "AWS::EC2::Instance": (
        "ec2",
        "describe_instances",
        "Reservations[].Instances[?State.Name != 'terminated'].InstanceId[]",
    ),
    "AWS::EFS::FileSystem": ("efs", "describe_file_systems", "FileSystems[].FileSystemId"),
    "AWS::EFS::MountTarget": ("efs", "describe_file_systems", "FileSystems[?NumberOfMountTargets > `0`].FileSystemId"),
    "AWS::IAM::Role": ("iam", "list_roles", "Roles[].RoleName"),
    "AWS::IAM::InstanceProfile": ("iam", "list_instance_profiles", "InstanceProfiles[].InstanceProfileName"),
    "AWS::AutoScaling::AutoScalingGroup": (
        "autoscaling",
        "describe_auto_scaling_groups",
        "AutoScalingGroups[].AutoScalingGroupName",
    ),
}
"""For each type of resource, where AWS lists those that there are."""
COSTS = [("ec2", "describe_volumes", "Volumes[].VolumeId"), ("ec2", "describe_addresses", "Addresses[].AllocationId")]
"""What costs, too, and comes with instances."""
OTHER_IDS = {"AWS::EC2::SecurityGroupIngress", "AWS::EC2::SubnetRouteTableAssociation", "AWS::EFS::MountTarget"}
"""What the stack calls otherwise than the lists do, or moto without a name."""


PAGE = (ROOT / "docs" / "aws.md").read_text("utf-8")
STAND_INS = """
curl() { echo 203.0.113.7; }
ssh() { :; }
scp() { :; }
ssh-add() { :; }
sleep() { :; }
distrun() { %s -m distrun "$@"; }
""" % shlex.quote(sys.executable)
"""What the blocks of the page call beside `aws`, and what the account is not asked for."""


def blocks(heading: str) -> list[str]:
    """Return the shell blocks below a heading of the page, up to the next of its level, but those typed on a host."""
    part = PAGE.partition(f"\n{heading}\n")[2]
    part = re.split("^#{2,%d} " % heading.count("#"), part, maxsplit=1, flags=re.MULTILINE)[0]
    assert part, heading
    return [block for block in re.findall(r"^```sh\n(.*?)^```$", part, re.M | re.S) if "# On the first" not in block]


def shown(text: str) -> set[str]:
    """Return of which kinds ids stand alone in lines of a text, by their first part."""
    return {word.partition("-")[0] for line in text.splitlines() for word in line.split("\t") if ID.fullmatch(word)}


def types() -> set[str]:
    """Return the types of the template's resources."""
    resources = TEMPLATE.partition("\nResources:\n")[2]
    return set(re.findall(r"^    Type: (AWS::\S+)$", resources, re.MULTILINE))


def listed(aws: Account) -> dict[Any, list[Any]]:
    """Return what there is in the account, of every type and of what costs."""
    return {kind: sorted(aws.found(*where)) for kind, where in [*LISTS.items(), *((cost, cost) for cost in COSTS)]}


def decoded() -> Any:
    """Return the template as cfn-lint reads it, which takes a second to import: not for each process of `-n`."""
    from cfnlint.decode import decode_str

    return decode_str(TEMPLATE)[0]


def test_cfn_lint_has_nothing_to_say() -> None:
    from cfnlint import api

    found = api.lint(TEMPLATE, config=api.ManualArgs(regions=["us-east-1", "eu-central-1"], include_checks=["I"]))
    assert [str(one) for one in found] == []


@pytest.mark.parametrize(
    ("parameter", "taken", "refused"),
    [
        ("SshAddress", ["203.0.113.7"], ["0.0.0.0/0", "203.0.113.7/24", "::1", ""]),
        ("InstanceType", ["c6i.xlarge", "p5.48xlarge", "u-6tb1.metal"], ["t3.micro", "t4g.small", "xlarge"]),
        (
            "Package",
            ["s3://b/d-1-py3-none-any.whl", "distrun==1.0", "https://h/d.whl?a=b&c=d"],
            ["a b", "';ls", "$(ls)", "`ls`", "-r"],
        ),
        ("MorePackages", ["", "torch==2.9.0 pillow", "a[b]>=1,<2"], ["x;ls", "'", "$x", "a\nb", "-r /etc/x"]),
        ("Zone", ["", "eu-central-1b", "us-east-1-bos-1a"], ["b", "eu-central-1"]),
        ("Bucket", ["", "my-data.2"], ["s3://my-data", "a/b", "*"]),
    ],
)
def test_a_parameter_takes_only_what_it_is_for(parameter: str, taken: list[str], refused: list[str]) -> None:
    """AWS compares the whole value. Nothing that means something to a shell or in a policy comes through."""
    template = decoded()
    pattern = template["Parameters"][parameter]["AllowedPattern"]
    assert [value for value in [*taken, *refused] if re.fullmatch(pattern, value)] == taken


def test_the_page_has_a_row_for_every_parameter_with_its_default() -> None:
    template = decoded()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\| ", PAGE.partition("### Create")[2], re.MULTILINE))
    parameters = template["Parameters"]
    defaults = {name: str(parameters[name].get("Default", "")) for name in parameters}
    described = {"Image": "Amazon Linux 2023, x86_64", "Zone": "first of the region"}
    assert {name: rows.get(name, "?").strip("`") for name in parameters} == {**defaults, **described}


def test_the_stack_waits_for_a_signal_of_every_host() -> None:
    template = decoded()
    waits = {name: one["CreationPolicy"] for name, one in template["Resources"].items() if "CreationPolicy" in one}
    assert {name: wait["ResourceSignal"].get("Count", 1) for name, wait in waits.items()} == {
        "FirstHost": 1,
        "Workers": {"Ref": "WorkerCount"},
    }
    set_up = json.dumps(template["Resources"]["LaunchTemplate"])
    assert all(f"resource={name}" in set_up for name in waits)


def test_template_and_user_data_are_no_larger_than_aws_takes() -> None:
    """51,200 bytes of a template body, 16 KB of user data before base64: AWS's user guides of both services."""
    assert len(TEMPLATE.encode()) <= 51_200
    script = TEMPLATE.partition("#!/bin/bash")[2].partition("- First:")[0]
    assert len(script.encode()) <= 16 * 1024


@pytest.mark.slow
def test_every_type_of_resource_exists_after_creation_and_is_gone_after_deletion(aws: Account) -> None:
    before = listed(aws)
    assert aws.create(WorkerCount="2")["StackStatus"] == "CREATE_COMPLETE"
    there = listed(aws)
    assert types() == set(LISTS)
    made = {kind: set(there[kind]) - set(before[kind]) for kind in there}
    assert {kind for kind in made if not made[kind]} == {COSTS[1]}, "it takes no elastic addresses"
    resources = aws.call("cloudformation", "describe_stack_resources", StackName="train")["StackResources"]
    ids = {one["ResourceType"]: one["PhysicalResourceId"] for one in resources if "PhysicalResourceId" in one}
    assert {kind for kind in ids if ids[kind] in made[kind]} == set(LISTS) - OTHER_IDS
    assert len(made["AWS::EC2::Instance"]) == 3
    assert made[COSTS[0]], "instances have volumes"
    aws.call("cloudformation", "delete_stack", StackName="train")
    assert listed(aws) == before


@pytest.mark.slow
def test_only_ssh_from_one_address_comes_in_and_disks_and_metadata_are_protected(aws: Account) -> None:
    aws.create()
    query = "SecurityGroups[?GroupName != 'default'].IpPermissions[]"
    query += ".[IpProtocol, FromPort, IpRanges[0].CidrIp, UserIdGroupPairs[0].GroupId]"
    (group,) = aws.found("ec2", "describe_security_groups", "SecurityGroups[?GroupName != 'default'].GroupId")
    assert sorted(aws.found("ec2", "describe_security_groups", query)) == [
        ["-1", None, None, group],
        ["tcp", 22, "203.0.113.7/32", None],
    ]
    (name,) = aws.found(*LISTS["AWS::EC2::LaunchTemplate"])
    versions = aws.call("ec2", "describe_launch_template_versions", LaunchTemplateId=name)["LaunchTemplateVersions"]
    data = versions[0]["LaunchTemplateData"]
    assert [data["Placement"]["GroupName"]] == aws.found(*LISTS["AWS::EC2::PlacementGroup"])
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    (disk,) = data["BlockDeviceMappings"]
    assert disk["Ebs"] == {"Encrypted": True, "DeleteOnTermination": True, "VolumeSize": 40, "VolumeType": "gp3"}
    assert aws.found("efs", "describe_file_systems", "FileSystems[].Encrypted") == [True]


@pytest.mark.slow
@pytest.mark.parametrize(("market", "percent"), [("on-demand", 100), ("spot", 0)])
def test_workers_are_spot_instances_if_asked_for_and_the_first_host_never_is(
    aws: Account, market: str, percent: int
) -> None:
    aws.create(Market=market, WorkerCount="3", Bucket="")
    (group,) = aws.call("autoscaling", "describe_auto_scaling_groups")["AutoScalingGroups"]
    policy = group["MixedInstancesPolicy"]["InstancesDistribution"]
    assert policy["OnDemandPercentageAboveBaseCapacity"] == percent
    assert (group["MinSize"], group["DesiredCapacity"], group["MaxSize"]) == (3, 3, 3)
    assert aws.found("ec2", "describe_instances", "Reservations[].Instances[].InstanceLifecycle") == []
    assert aws.found(*LISTS["AWS::IAM::Role"]) == [], "without a bucket hosts may do nothing"


@pytest.mark.slow
def test_first_host_is_alone_in_its_subnet_so_that_its_address_is_free(aws: Account) -> None:
    aws.create(WorkerCount="2")
    query = "Reservations[].Instances[].[SubnetId, PrivateIpAddress]"
    (first,) = (subnet for subnet, address in aws.found("ec2", "describe_instances", query) if address == "10.0.0.10")
    (file_system,) = aws.found(*LISTS["AWS::EFS::FileSystem"])
    (target,) = aws.call("efs", "describe_mount_targets", FileSystemId=file_system)["MountTargets"]
    groups = aws.found("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups[].VPCZoneIdentifier")
    assert groups == [target["SubnetId"]]
    assert first not in groups
    query = "Subnets[?starts_with(CidrBlock, '10.')].AvailabilityZone"
    assert len(set(aws.found("ec2", "describe_subnets", query))) == 1, "a cluster placement group is in one zone"


@pytest.mark.slow
def test_command_of_the_page_prints_the_first_failure_of_a_stack(aws: Account, tmp_path: Path) -> None:
    assert aws.create(Zone="eu-central-1z")["StackStatus"] == "ROLLBACK_COMPLETE"
    failed = "StackEvents[?ResourceStatus == 'CREATE_FAILED']"
    assert len(jmespath.search(failed, aws.call("cloudformation", "describe_stack_events", StackName="train"))) > 1
    command, _ = blocks("### If it fails")
    name, reason = json.loads(aws.shell("stack=train\n" + command, tmp_path))
    assert name == "Subnet"
    assert "eu-central-1z" in reason


@pytest.mark.slow
def test_command_of_the_page_prints_why_workers_do_not_start(aws: Account, tmp_path: Path) -> None:
    aws.create()
    _, command = blocks("### If it fails")
    assert aws.shell("stack=train\n" + command, tmp_path) == "no capacity\n"
    assert aws.shell("stack=trai\n" + command, tmp_path) == "", "the group of another stack"


@pytest.mark.slow
def test_commands_of_the_page_let_in_the_new_address_instead_of_the_old_one(aws: Account, tmp_path: Path) -> None:
    aws.create()
    (commands,) = blocks("### If your address changes")
    aws.shell("curl() { echo 198.51.100.9; }\nstack=train\n" + commands, tmp_path)
    query = "SecurityGroups[].IpPermissions[].IpRanges[?CidrIp != '0.0.0.0/0'].CidrIp[]"
    assert aws.found("ec2", "describe_security_groups", query) == ["198.51.100.9/32"]


@pytest.mark.slow
def test_the_commands_of_the_page_create_a_stack_show_it_and_leave_nothing(aws: Account, tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "distrun-1.0-py3-none-any.whl").touch()
    before = listed(aws)
    (start,), (create_,), (train,) = (blocks("### " + title) for title in ("Before", "Create", "Train"))
    delete, show, rest = blocks("### Delete")
    begin = "\n".join([STAND_INS, start, create_, train, show])
    said = aws.shell(begin, tmp_path)
    assert "ssh ec2-user@" in said
    assert (tmp_path / "train.pem").stat().st_mode & 0o077 == 0
    assert shown(said) == {"i", "fs", "vpc"}, "moto does not name the disks of a group"
    names = "export AWS_DEFAULT_REGION=eu-central-1\nstack=train\naddress=there\n"
    bucket = "bucket=$stack-$(aws sts get-caller-identity --query Account --output text)\n"
    aws.shell(STAND_INS + names + delete, tmp_path)
    assert aws.shell(names + show, tmp_path) == "", "nothing that costs is left"
    aws.shell(names + bucket + rest, tmp_path)
    assert listed(aws) == before
    assert aws.found("s3", "list_buckets", "Buckets[].Name") == []
    assert aws.found("ec2", "describe_key_pairs", "KeyPairs[].KeyName") == []


@pytest.mark.slow
def test_the_commands_by_hand_make_hosts_and_leave_nothing(aws: Account, tmp_path: Path) -> None:
    before = listed(aws)
    make, move, delete = blocks("## By hand")
    show = blocks("### Delete")[1]
    said = aws.shell("\n".join([STAND_INS, make, "cat hosts; stack=$name", show, move, delete]), tmp_path)
    assert len(re.findall(r"^172\.31\.\d+\.\d+$", said, re.MULTILINE)) == 3
    assert shown(said) == {"i", "vol", "fs"}
    assert listed(aws) == before
    assert aws.found("ec2", "describe_key_pairs", "KeyPairs[].KeyName") == []


def test_the_price_of_an_instance_is_read_out_of_the_answer_of_aws(tmp_path: Path) -> None:
    """The form of a price list: https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/price-changes.html"""
    price = {"unit": "Hrs", "pricePerUnit": {"USD": "0.1940000000"}}
    terms = {"OnDemand": {"SKU.TERM": {"priceDimensions": {"SKU.TERM.RATE": price}}}}
    (tmp_path / "answer").write_text(json.dumps({"product": {}, "terms": terms}))
    (command,) = blocks("### What it will cost")
    script = 'AWS_DEFAULT_REGION=x; type=x; aws() { [ "$1" != pricing ] || cat answer; }\n' + command
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "0.1940000000 per Hrs\n"
